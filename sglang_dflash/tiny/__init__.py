"""The package's tiny trained pairs: their files, their command line, their corpus and workloads."""
