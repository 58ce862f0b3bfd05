"""Tiny trained pairs of this package: files, command line, corpus and workloads."""
