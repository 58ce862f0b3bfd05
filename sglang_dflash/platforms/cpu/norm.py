"""Row-wise norms and gates around attention and GatedDeltaNet.

Dimension key: T tokens, G key heads, H value heads, E head width, F features of a row.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sglang_dflash.platforms.cpu.refuse import refuse

_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the projections [q | k | v | z] and [b | a] of GatedDeltaNet into qkv [T, F], z [T, H, E], b and a [T, H].

    The results are views, because their users accept any stride.
    """
    n_qkv = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    qkv_TF, z_TF = mixed_qkvz.split([n_qkv, num_heads_v * head_v], dim=1)
    b_TH, a_TH = mixed_ba.split(num_heads_v, dim=1)
    return qkv_TF, z_TF.unflatten(1, (num_heads_v, head_v)), b_TH, a_TH


def rms_norm_gated(
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """Return the RMS norm of the last dimension times silu(z) or sigmoid(z), computed in fp32, in x's dtype."""
    refuse(
        "rms_norm_gated",
        {
            "is_rms_norm=False (layer norm)": not is_rms_norm,
            "bias": bias,
            "group_size": group_size is not None and group_size != x.shape[-1],
            "norm_before_gate=False": not norm_before_gate,
            f"activation={activation!r}": activation not in _GATES,
        },
    )
    y = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    if z is not None:
        y = y * _GATES[activation](z.reshape(x.shape).float())
    return y.to(x.dtype)


def fused_sigmoid_mul(
    attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """Return attn_output * sigmoid(gate), computed in fp32; `gate` may be [T, H, E] for an output [T, H * E]."""
    refuse("fused_sigmoid_mul", {"quant (fp8 output)": quant})
    gate_TF = gate.reshape(attn_output.shape).float().sigmoid()
    out = attn_output if inplace else torch.empty_like(attn_output)
    return torch.mul(attn_output, gate_TF, out=out) if out.dtype == torch.float32 else out.copy_(attn_output * gate_TF)


def fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add a shared expert's output [T, F] times sigmoid(hidden . gate) to `final_hidden_states`, per row in fp32."""
    gate_T1 = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
    final_hidden_states.copy_(torch.addcmul(final_hidden_states.float(), gate_T1, shared_output.float()))


def rms_sumsq_serial(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of the rows of x1 [T, F], then of x2 [T, F'], fp32, padded to a multiple of 4."""
    sums = torch.cat([x.float().square().sum(dim=-1) for x in (x1, x2)])
    return F.pad(sums, (0, -len(sums) % 4))


def rms_apply_serial(
    x1: torch.Tensor,
    x2: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    sum_sq: torch.Tensor,
    tp_world: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norms of x1 [T, F] and x2 [T, F'], in their dtypes.

    Each row is split over `tp_world` ranks. `sum_sq` is the sum of the ranks' `rms_sumsq_serial`.
    """
    sums = sum_sq[: 2 * len(x1)].view(2, -1, 1)
    return tuple(  # type: ignore[return-value]
        (x.float() * torch.rsqrt(sum_T1 / (x.shape[-1] * tp_world) + eps) * w.float()).to(x.dtype)
        for x, w, sum_T1 in zip((x1, x2), (w1, w2), sums, strict=True)
    )


def softcap_logits(
    full_logits: torch.Tensor, final_logit_softcapping: float | None, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Write cap * tanh(logits / cap) into `output`, by default in place. Without a cap write the logits."""
    capped = full_logits
    if final_logit_softcapping is not None:
        capped = final_logit_softcapping * (full_logits.float() / final_logit_softcapping).tanh()
    return (full_logits if output is None else output).copy_(capped)


def table_qk_norm_rope_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """RMS-normalise and rotate (neox style) the q and k heads of qkv [T, (q + 2 k) E] in place; v is unchanged."""
    cos_T1E, sin_T1E = cos_sin_cache.index_select(0, positions.long()).float()[:, None].chunk(2, dim=-1)
    heads_THE = qkv[:, : (num_q_heads + num_k_heads) * head_dim].unflatten(1, (-1, head_dim))
    weight_HE = torch.cat([q_weight.float().expand(num_q_heads, -1), k_weight.float().expand(num_k_heads, -1)])
    normed_THE = F.rms_norm(heads_THE.float(), (head_dim,), eps=eps) * weight_HE
    # The kernel rounds the normalised head before it rotates it.
    first_THE, second_THE = normed_THE.to(qkv.dtype).float().chunk(2, dim=-1)
    out_first_THE, out_second_THE = heads_THE.chunk(2, dim=-1)
    torch.addcmul(first_THE * cos_T1E, second_THE, sin_T1E, value=-1, out=out_first_THE)
    torch.addcmul(second_THE * cos_T1E, first_THE, sin_T1E, out=out_second_THE)
