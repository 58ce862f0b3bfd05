"""Fields of a LiLiCorr head in `dflash_config`, and the shapes of its tensors. `lilicorr.py` has the head.

Source: SGLang 0.5.23 `speculative/lilicorr_utils.py`, which requires the same fields.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_dflash.engine.draft.fields import Fields

LILICORR = "LiLiCorrDraftModel"  # architecture
PREFIX = "lilicorr_"  # of the fields
HEAD = "lilicorr."  # prefix of the names of the head's tensors
N_NUMBERS = 5  # numbers that the head reads about each candidate


class LiLiCorrSizes(NamedTuple):
    """Sizes and numbers of a LiLiCorr head, named as in `dflash_config` without the prefix."""

    candidate_topk: int  # candidates per slot
    hidden_size: int  # width of a candidate's state; 0: the draft's hidden size
    num_layers: int
    num_heads: int
    mlp_ratio: float  # width of an MLP, in widths of the state
    factor_dim: int  # width of the vectors whose product is a pair's score
    vector_eps: float
    logit_scale: float


FIELDS = (f"{PREFIX}enabled", *(PREFIX + name for name in LiLiCorrSizes._fields))


def sizes_of(config: Mapping[str, Any], path: str) -> LiLiCorrSizes | None:
    """Return the sizes of a draft's LiLiCorr head; None if the draft has none.

    No size has a default. Some sizes change no tensor's shape, so nothing would show that a default is wrong.

    Raises:
        ValueError: a size is missing or wrong.
    """
    inner = config["dflash_config"]
    given = [field for field in FIELDS[1:] if inner.get(field) is not None]
    if inner.get(FIELDS[0]) is False or not (given or LILICORR in config["architectures"]):
        return None
    fields = Fields(inner, path, "", home="dflash_config")
    decimal = ("mlp_ratio", "vector_eps", "logit_scale")
    values: dict[str, Any] = {
        name: float(fields.number(PREFIX + name))
        if name in decimal
        else fields.count(PREFIX + name, least=int(name != "hidden_size"))
        for name in LiLiCorrSizes._fields
    }
    return LiLiCorrSizes(**values)


def shapes(sizes: LiLiCorrSizes, hidden: int, block_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the head's tensors by name, for a draft with this hidden size and trained block."""
    width, n_heads = sizes.hidden_size or hidden, sizes.num_heads
    inner = int(width * sizes.mlp_ratio)
    linear = {
        "pass_hidden_proj": (width, hidden), "context_proj": (width, hidden), "factor_input_proj": (width, 3 * width),
        "feature_mlp.up_proj": (width, N_NUMBERS), "feature_mlp.down_proj": (width, width),
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (sizes.factor_dim, width)),
        **({} if width == hidden else {"token_proj": (width, hidden)}),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {
        "slot_embedding": (1, 1, block_size - 1, 1, width),
        "rank_embedding": (1, 1, 1, sizes.candidate_topk, width),
        "relative_slot_bias": (n_heads, 2 * block_size - 1),
        "same_slot_bias": (n_heads,),
        "feature_norm.weight": (N_NUMBERS,),
        "feature_norm.bias": (N_NUMBERS,),
        "output_norm.weight": (width,),
        "anchor_norm.weight": (width,),
    }
    for i in range(sizes.num_layers):
        layer = f"layers.{i}"
        linear |= {
            f"{layer}.attn.out_proj": (width, width), f"{layer}.mlp.up_proj": (inner, width),
            f"{layer}.mlp.down_proj": (width, inner),
        }  # fmt: skip
        found |= {f"{layer}.attn.in_proj_weight": (3 * width, width), f"{layer}.attn.in_proj_bias": (3 * width,)}
        found |= {f"{layer}.attn_norm.weight": (width,), f"{layer}.mlp_norm.weight": (width,)}
    for name, shape in linear.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {HEAD + name: shape for name, shape in found.items()}
