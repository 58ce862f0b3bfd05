"""Platforms: what lets SGLang and the engine run without a GPU.

`cpu/` is an SGLang platform that serves on a CPU. `rehearsal/` emulates on it what a GPU runs: captured graphs,
attention backends and streams. This wing imports the engine.
"""
