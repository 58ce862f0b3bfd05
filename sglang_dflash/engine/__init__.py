"""Engine: what serves a request inside SGLang.

Start at `worker.py`: its `decode` calls the stages of a step in order, and each stage has a file in `stages/`.
`config.py` decides variants before weights load. `draft/` is the draft model, `memory/` the memory of requests,
`width/` the choice of the verify width, and `host/` the interface to SGLang. This wing imports only the ground:
`flags`, `errors`, `cli` and the kernels.
"""
