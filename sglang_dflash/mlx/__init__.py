"""DFlash on MLX: a target loaded by mlx-lm and a DFlash draft, for one text at a time.

    sglang-dflash mlx --model Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --prompt "Why is the sky blue?"

mlx-lm's models run unchanged, and calls of their layers are recorded (`target.py`). Needs
`pip install "sglang-dflash[mlx]"`, but neither torch nor SGLang.
"""

try:
    import mlx.core  # noqa: F401
    import mlx_lm  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'sglang_dflash.mlx found no module named {error.name}; pip install "sglang-dflash[mlx]"', name=error.name
    ) from error

from sglang_dflash.mlx.generate import DecodedStep, Options, spec_steps, stream_generate
from sglang_dflash.mlx.pair import Pair, load

__all__ = ["DecodedStep", "Options", "Pair", "load", "spec_steps", "stream_generate"]
