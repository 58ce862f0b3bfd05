"""DFlash on MLX: a target loaded by mlx-lm and a DFlash draft, for one text at a time.

    sglang-dflash mlx --model Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --prompt "Why is the sky blue?"

    from sglang_dflash.reference.mlx import Options, load, stream_generate

    pair = load("Qwen/Qwen3.5-4B", "z-lab/Qwen3.5-4B-DFlash")
    prompt = pair.tokenizer.apply_chat_template([{"role": "user", "content": "..."}], add_generation_prompt=True)
    for text, step in stream_generate(pair, prompt, Options(max_new_tokens=2048)):
        print(text, end="", flush=True)  # step.n_accepted: accepted drafts of this step

`Options(sampler=mlx_lm.sample_utils.make_sampler(...))` uses a sampler of mlx-lm and keeps its sampling distribution.

mlx-lm is neither copied nor edited: its models run unchanged, and their layers' calls are recorded (`target.py`). This
package needs `mlx` and `mlx-lm`, but neither torch nor SGLang. Names are imported when they are used, so that the
command line prints its help without MLX.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dflash.reference.mlx.generate import DecodedStep, Options, spec_steps, stream_generate
    from sglang_dflash.reference.mlx.pair import Pair, load

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
        package = "mlx" if sys.platform == "darwin" else '"mlx[cpu]"'
        raise ModuleNotFoundError(
            f"sglang_dflash.reference.mlx found no module named {error.name}; pip install {package} mlx-lm",
            name=error.name,
        ) from error
    module = "pair" if name in ("Pair", "load") else "generate"
    return vars(import_module(f"{__name__}.{module}"))[name]
