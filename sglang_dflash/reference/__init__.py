"""Reference: DFlash outside SGLang.

`torch/` defines the draft and the steps of generation in PyTorch. Tests compare servers with it, and the trainer trains
its draft. `mlx/` answers one request at a time with MLX, for Apple chips. This wing imports the reader of drafts,
`engine/draft`.
"""
