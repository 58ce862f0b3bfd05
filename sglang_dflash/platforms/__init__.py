"""Platforms."""
