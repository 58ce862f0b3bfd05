"""Rotary position embedding of the draft. A head's first E dimensions are rotated, in pairs (e, e + E/2).

E is the whole head, or `rope_dim` if rope_parameters has it.
Angles, cosines and sines are computed in fp32. The rotation itself runs in the draft's dtype.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_dflash.engine.draft.record import Checkpoint


class Rotation(NamedTuple):
    """Cosine and sine of every position's angles, [..., S, E] each; broadcasts over heads."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_frequencies(config: Checkpoint) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each of E/2 pairs, fp32, and a factor for cosine and sine (1 unless yarn)."""
    rope = tuple(sorted(config.rope_parameters.items()))
    return _rope_frequencies(config.rotary_width, config.max_position_embeddings, rope)


@cache
def _rope_frequencies(
    head_dim: int, max_position_embeddings: int, rope: tuple[tuple[str, Any], ...]
) -> tuple[torch.Tensor, float]:
    parameters = dict(rope)
    if parameters["rope_type"] == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return parameters["rope_theta"] ** -exponents, 1.0
    # Transformers' functions for scaled rope types require one of its own configs.
    config = Qwen3Config(head_dim=head_dim, max_position_embeddings=max_position_embeddings, rope_parameters=parameters)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


def rotation_at(positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype) -> Rotation:
    """Return the rotation at `positions`, int64 [..., S], as [..., S, E] in `dtype`."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return Rotation((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype))


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the first E dimensions of `heads`, [..., S, head width]."""
    width = rotation.cos.shape[-1]
    rotated, kept = heads[..., :width], heads[..., width:]
    left, right = rotated.chunk(2, dim=-1)
    rotated = rotated * rotation.cos + torch.cat([-right, left], dim=-1) * rotation.sin
    return torch.cat([rotated, kept], dim=-1)
