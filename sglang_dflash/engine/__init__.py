"""Engine: what serves a request inside SGLang.

Start at `worker.py`: its `decode` calls the stages of a step in order, and its docstring names the file of each stage.
`config.py` decides variants before weights load, and `hooks.py` sets hooks on SGLang's scheduler. `draft/` is the draft
model, `memory/` the memory of requests, `width/` the choice of the verify width, and `host/` the interface to SGLang.
This wing imports only the ground: `flags`, `errors`, `cli` and the kernels.
"""
