"""Server processes: command lines of a benchmark's servers, ports, start and stop, and files of measurements."""
