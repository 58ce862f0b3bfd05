"""CUDA's settings for Qwen3.5 and Qwen3-Next, because SGLang 0.5.23 reads `_is_cuda` in these two models.

The emulated GPU has CUDA's defaults:

    alternative stream      In captured forwards a second stream runs the projections of Gated DeltaNet's gates, the
                            norm of K, and experts. In Qwen3.5 it runs this norm only if attention has no output gate.
    fused projection        One Triton kernel unpacks and convolves Gated DeltaNet's projections. It serves decode and a
                            verify of width 1, but no wider verify. Triton's interpreter runs it.
    strided prompts         Gated DeltaNet reads a prompt's projections in place.
    fused Q/K preparation   Norms, rotation and output gate are one launch. `qk_norm_rope_gate` replaces the kernel,
                            because the kernel rounds to 16 bits.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from sglang_dflash.platforms.rehearsal import graph

logger = logging.getLogger(__name__)

_LOADER = "sglang.srt.model_loader.loader"
_MODELS = "sglang.srt.models.qwen3_5", "sglang.srt.models.qwen3_next"
_BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
_FUSED = "sglang.kernels.ops.attention.triton_gdn_fused_proj"
_BREAKABLE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
_FUSE = "fused_qkvzba_causal_conv1d_update_contiguous"
_CAN_USE, _SPLIT = f"can_use_{_FUSE}", "fused_qkvzba_split_reshape_cat_contiguous"

_fused_widths: set[int] = set()  # verify widths at which the fused projection has been captured


def device() -> None:
    """Redirect `torch.cuda.current_stream` and `torch.cuda.stream`, which these models call, to `torch.cpu`."""
    torch.cpu.Stream.stream_id = property(id)  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    cuda.current_stream = lambda device=None: torch.cpu.current_stream(device)
    cuda.stream = lambda stream: torch.cpu.stream(stream)


def before_models() -> None:
    """Apply CUDA's settings when the first model is created, because the two models cannot be imported earlier."""
    loader: Any = importlib.import_module(_LOADER)
    loader._initialize_model = _first(models, loader._initialize_model)


def _first(prepare: Callable[[], None], fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        prepare()
        return fn(*args, **kwargs)

    return call


@functools.cache  # runs once, though it is called for two models: target and draft
def models() -> None:
    from sglang.srt.environ import envs

    fused, backend, breakable, qwen3_5, qwen3_next = map(
        importlib.import_module, (_FUSED, _BACKEND, _BREAKABLE, *_MODELS)
    )
    put: dict[ModuleType, dict[str, Any]] = {
        qwen3_next: {"_is_cuda": True},
        qwen3_5: {
            "_is_cuda": True,
            "_gdn_use_alt_stream": True,
            "_qknorm_use_alt_stream": True,
            "_gdn_decode_fused_proj_conv": envs.SGLANG_ENABLE_GDN_DECODE_FUSED_PROJ_CONV.get(),
            "_GDN_FUSED_QKVZBA_RATIOS": (1, 2, 3, 4),
            "fused_qk_gemma_rmsnorm_rope_gate": graph.launch(qk_norm_rope_gate),
        },
        # At the end of a prefill graph's segment, `breakable` queries the CUDA runtime for streams to wait for.
        breakable: {"_is_stream_capturing": graph.takes_part},
        fused: {_CAN_USE: on_cuda(vars(fused)[_CAN_USE])},
    }
    for module, values in put.items():
        vars(module).update(values)
    # The backend imports these functions only on a GPU.
    vars(backend).update({name: vars(fused)[name] for name in (_CAN_USE, _SPLIT)})
    vars(backend)[_FUSE] = reported(vars(fused)[_FUSE])


def on_cuda(can_use: Callable[..., tuple[bool, str]]) -> Callable[..., tuple[bool, str]]:
    """Wrap SGLang's check for the fused projection, so that it accepts a CPU tensor as if it were on CUDA."""

    @functools.wraps(can_use)
    def asked(mixed_qkvz: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        there = SimpleNamespace(is_cuda=True, dtype=mixed_qkvz.dtype, stride=mixed_qkvz.stride)
        return can_use(there, *args, **kwargs)

    return asked


def reported(fused: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the fused projection so that it logs its first capture at each verify width."""
    from sglang.srt.runtime_context import get_spec

    @functools.wraps(fused)
    def call(*args: Any, **kwargs: Any) -> Any:
        width = get_spec().speculative_num_draft_tokens or 1
        if graph.is_capturing() and width not in _fused_widths:
            _fused_widths.add(width)
            logger.info("Captured the fused projection of Gated DeltaNet for %d token(s) per request", width)
        return fused(*args, **kwargs)

    return call


def qk_norm_rope_gate(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    has_gate: bool = True,
    mrope_axis_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Normalise the heads of Q and K (Gemma's norm: 1 + weight) and rotate their first dimensions, neox halves.

    Args:
        q_gate: [T, q E] for q heads of width E, or if `has_gate` [T, 2 q E] with each head's gate after the head.
        k: [T, k E] for k heads.
        cos_sin_cache: [positions, rotary_dim], cosines first.
        positions: int [T], or [3, T] (three axes) with `mrope_axis_map`.
        mrope_axis_map: int [rotary_dim / 2], the axis whose position rotates each pair.
    Returns:
        Q [T, q E], K [T, k E] and the gates [T, q, E] or None, in new memory.
    """
    T = len(q_gate)
    q_THE, gate_THE = q_gate.view(T, num_q_heads, -1, head_dim).unbind(2) if has_gate else (q_gate, None)
    if mrope_axis_map is None:
        cos_TR, sin_TR = cos_sin_cache[positions.long()].float().chunk(2, dim=-1)
    else:
        table_3TR = cos_sin_cache[positions.long()].float()
        axis_1TR = mrope_axis_map.long().expand(1, T, -1)
        cos_TR, sin_TR = (part.gather(0, axis_1TR)[0] for part in table_3TR.chunk(2, dim=-1))

    def prepared(x: torch.Tensor, weight: torch.Tensor, n_heads: int) -> torch.Tensor:
        x_THE = x.reshape(T, n_heads, head_dim)
        x_THE = (F.rms_norm(x_THE.float(), (head_dim,), eps=eps) * (1 + weight.float())).to(x.dtype)
        first, second = x_THE[..., :rotary_dim].float().chunk(2, dim=-1)
        cos, sin = cos_TR[:, None], sin_TR[:, None]
        rotated = first * cos - second * sin, second * cos + first * sin, x_THE[..., rotary_dim:].float()
        return torch.cat(rotated, dim=-1).to(x.dtype).view(T, -1)

    q_TF, k_TF = prepared(q_THE, q_weight, num_q_heads), prepared(k, k_weight, num_kv_heads)
    return q_TF, k_TF, None if gate_THE is None else gate_THE.contiguous()
