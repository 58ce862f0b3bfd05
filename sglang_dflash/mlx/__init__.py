"""DFlash on MLX: a target loaded by mlx-lm and a DFlash draft, for one text at a time.

    sglang-dflash mlx --model Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --prompt "Why is the sky blue?"

mlx-lm is neither copied nor edited: its models run unchanged, and their layers' calls are recorded (`target.py`). This
package needs `pip install "sglang-dflash[mlx]"`, but neither torch nor SGLang. Names are imported when they are used,
so that the command line prints its help without MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dflash.mlx.generate import DecodedStep, Options, spec_steps, stream_generate
    from sglang_dflash.mlx.pair import Pair, load

__all__ = ["DecodedStep", "Options", "Pair", "load", "spec_steps", "stream_generate"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__`.

    Raises:
        AttributeError: `name` is not in `__all__`.
        ModuleNotFoundError: MLX is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import mlx.core  # noqa: F401
        import mlx_lm  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'sglang_dflash.mlx found no module named {error.name}; pip install "sglang-dflash[mlx]"', name=error.name
        ) from error
    module = "pair" if name in ("Pair", "load") else "generate"
    return vars(import_module(f"{__name__}.{module}"))[name]
