"""Server processes: command lines of the arms, ports, start and stop, and documents of measurements."""
