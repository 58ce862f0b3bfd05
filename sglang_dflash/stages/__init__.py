"""Stages of a decode step, one file each; `worker.py` calls them in order."""
