"""Reference: DFlash outside SGLang.

`torch/` defines the draft and the steps of generation in PyTorch. Tests compare servers with it, and the trainer trains
its draft. `mlx/` serves one request on Apple chips. This wing imports the reader of drafts, `engine/draft`.
"""
