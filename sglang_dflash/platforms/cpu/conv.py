"""Short causal convolution of GatedDeltaNet, over the last W tokens of each channel.

y[t] = activation(bias + sum_j weight[j] * x[t - (W - 1) + j]), where x before the first token is the carried state: the
last W - 1 inputs, oldest first.

Dimension key: B requests, N new tokens per request, T packed tokens, F channels, W taps, P = W - 1 carried inputs, S
state slots. Results are computed in fp32 and returned in x's dtype. In a result the F values of a token are adjacent in
memory, even if the token's axis is the last.
"""

import torch
import torch.nn.functional as F

from sglang_dflash.platforms.cpu.padding import n_real, with_padding
from sglang_dflash.platforms.cpu.refuse import refuse


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | bool | None = "silu",
    **others: object,
) -> torch.Tensor:
    """Convolve a prefill's packed tokens x [F, T] to [F, T], and store each request's last P inputs in its state slot.

    `conv_states` is [S, F, P]. Tokens after the last request are padding, with results of zero. State slots must not
    be negative.
    """
    refuse("causal_conv1d_fn", others)
    start_B = query_start_loc.long()
    n_tokens_B = start_B.diff()
    B, P = n_tokens_B.shape[0], weight.shape[1] - 1
    slot_B = torch.arange(B) if cache_indices is None else cache_indices[:B].long()

    # One sequence of all requests, each preceded by its P carried inputs, so that no window crosses a request.
    carried_BPF = conv_states[slot_B, :, :P].transpose(1, 2).float()
    if has_initial_state is not None:
        carried_BPF = carried_BPF * has_initial_state[:B, None, None]
    else:
        carried_BPF = torch.zeros_like(carried_BPF)
    T = int(start_B[-1])
    request_T = torch.arange(B).repeat_interleave(n_tokens_B, output_size=T)
    row_T = torch.arange(T) + P * (request_T + 1)
    row_BP = (start_B[:-1] + P * torch.arange(B))[:, None] + torch.arange(P)
    joined = x.new_zeros((T + P * B, x.shape[0]), dtype=torch.float32)
    joined[row_T] = x[:, :T].T.float()
    joined[row_BP] = carried_BPF

    y = _convolve(joined[None], weight, bias, activation)[0]
    out_TF = x.new_zeros(x.shape[::-1])
    out_TF[:T] = y[row_T - P]
    last_BP = (start_B[1:] + P * torch.arange(B))[:, None] + torch.arange(P)
    conv_states[slot_B, :, :P] = joined[last_BP].transpose(1, 2).to(conv_states.dtype)
    return out_TF.T


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    *,
    conv_state_indices: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    **others: object,
) -> torch.Tensor:
    """Convolve the next tokens of B requests, and advance the state slots. x is [B, F] for one token, else [B, F, N].

    Verify also stores the state after each of its N tokens in row `intermediate_state_indices[b]` of
    `intermediate_conv_window` [rows, >= N, F, P]. As with the GPU kernel, the state slot gets the state at the end of
    the block. The commit overwrites the state slot with the state after the last kept token. Padding requests, whose
    state slot is negative, return NaN.
    """
    refuse("causal_conv1d_update", others)
    P = weight.shape[1] - 1
    n_rows = x.shape[0]
    slot_B = torch.arange(n_rows) if conv_state_indices is None else conv_state_indices[:n_rows].long()
    B = n_real(slot_B)
    x, slot_B = x[:B], slot_B[:B]
    carried_BFP = conv_state.index_select(0, slot_B)[:, :, :P].float()
    if x.dim() == 2 and intermediate_conv_window is None:
        y_BF = _one_token(x, carried_BFP, (weight, bias, activation), (conv_state, slot_B))
        return with_padding(y_BF, n_rows)
    x_BNF = x[:, None] if x.dim() == 2 else x.transpose(1, 2)
    joined = torch.cat([carried_BFP.transpose(1, 2), x_BNF.float()], dim=1)
    y_BNF = _convolve(joined, weight, bias, activation).to(x.dtype)
    _keep(conv_state, slot_B, joined[:, -P:].transpose(1, 2))
    if intermediate_conv_window is not None:
        assert intermediate_state_indices is not None
        _save_windows(intermediate_conv_window, intermediate_state_indices[:B].long(), joined)
    y_BNF = with_padding(y_BNF, n_rows)
    return y_BNF[:, 0] if x.dim() == 2 else y_BNF.transpose(1, 2)


def _one_token(
    x: torch.Tensor,
    carried_BFP: torch.Tensor,
    taps: tuple[torch.Tensor, torch.Tensor | None, str | bool | None],
    kept_in: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Convolve one token per request, the most frequent call. Channels precede time, so nothing is transposed."""
    weight, bias, activation = taps
    window_BFW = torch.cat([carried_BFP, x[:, :, None].float()], dim=2)
    y_BF = _activated((window_BFW * weight.float()).sum(dim=2), bias, activation)
    _keep(*kept_in, window_BFW[:, :, 1:])
    return y_BF.to(x.dtype)


def _keep(pool: torch.Tensor, slot_B: torch.Tensor, state_BFP: torch.Tensor) -> None:
    """Store states in the first P columns of the state slots. A pool may have more columns."""
    state_BFP = state_BFP.to(pool.dtype)
    if pool.shape[2] == state_BFP.shape[2]:
        pool.index_copy_(0, slot_B, state_BFP)
    else:
        pool[slot_B, :, : state_BFP.shape[2]] = state_BFP


def _convolve(
    joined: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | bool | None
) -> torch.Tensor:
    """Convolve [B, P + N, F] to [B, N, F], fp32, by W shifted multiply-adds, which are faster than conv1d here."""
    taps_WF = weight.T.float().unbind(0)
    N = joined.shape[1] - len(taps_WF) + 1
    y = joined[:, :N] * taps_WF[0]
    for j, tap_F in enumerate(taps_WF[1:], start=1):
        y.addcmul_(joined[:, j : j + N], tap_F)
    return _activated(y, bias, activation)


def _activated(y: torch.Tensor, bias: torch.Tensor | None, activation: str | bool | None) -> torch.Tensor:
    """Add the bias and apply the activation, in place."""
    if bias is not None:
        y += bias.float()
    if activation in ("silu", "swish", True):
        return F.silu(y, inplace=True)
    if activation in (None, False):
        return y
    raise NotImplementedError(
        f"causal convolution: activation={activation!r} is not defined on the CPU platform; run this model on a GPU"
    )


def _save_windows(window: torch.Tensor, row_B: torch.Tensor, joined: torch.Tensor) -> None:
    """Store the convolution state after each token t: the P inputs up to and including t, as [F, P].

    These inputs are joined[:, t + 1 : t + 1 + P], because P earlier inputs precede the block.

    Successive windows share P - 1 inputs. If SGLang stores them as overlapping views of one strip, the strip is written
    once.
    """
    R, _, F_, P = window.shape
    step_stride, tap_stride = window.stride(1), window.stride(3)
    if step_stride == tap_stride:
        n_inputs = joined.shape[1] - 1
        strip = window.as_strided((R, F_, n_inputs), (window.stride(0), window.stride(2), tap_stride))
        strip.index_copy_(0, row_B, joined[:, 1:].transpose(1, 2).to(window.dtype))
    else:
        windows_BNFP = joined[:, 1:].unfold(1, P, 1)
        window[row_B, : windows_BNFP.shape[1]] = windows_BNFP.to(window.dtype)
