"""Metrics, times and traces of a server's steps."""
