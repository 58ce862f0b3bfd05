"""Tiny trained pairs of this package: their files, launch flags, corpus and workloads."""
