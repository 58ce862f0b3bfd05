"""Stages of a decode step, and their parts. `DFlashWorker.decode` calls the stages in order."""
