"""The stages of a decode step, a file each; `worker.py` calls them in order."""
