"""GatedDeltaNet's kernels: gates, prefill in chunks of 64 tokens, decode, and verify of a drafted block.

`kernels/gdn_block.py` has the mathematics. This file converts SGLang's packed arguments and state slots.

Dimension key: B sequences, C tokens of a block or chunk, M chunks of 64 tokens, T packed tokens, G key heads, H value
heads (H a multiple of G), Y pairs of a block (or chunk) and a value head, K key width, V value width, S state slots.
Arithmetic is fp32.
"""

import torch
from sglang_dflash_kernels.gdn_block import DeltaBlock, by_token, l2_normalised, log_decay

from sglang_dflash.platforms.cpu.padding import n_real, with_padding
from sglang_dflash.platforms.cpu.refuse import refuse

CHUNK = 64  # SGLang's prefix cache reads the states before tokens 0, 64, 128, ...


def fused_gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log decay and sigmoid(b), both fp32 [1, T, H], for a, b [T, H].

    As in SGLang's kernel, sigmoid(b) is rounded to b's dtype before the conversion to fp32.
    """
    g_TH = log_decay(A_log, a, dt_bias, beta=beta, threshold=threshold)
    return g_TH[None], b.float().sigmoid().to(b.dtype).float()[None]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Prefill packed sequences: q, k [1, T, G, K], v [1, T, H, V], g and beta [1, T, H].

    Sequence b starts from state slot `initial_state_indices[b]` of `initial_state` [S, H, V, K]. With `inplace_update`
    its last state is stored in this slot. A sequence with a negative slot starts from zeros and stores no state.

    Returns:
        Outputs [1, T, H, V], None, and the fp32 states before each chunk, sequence by sequence, [1, M, H, V, K].
    """
    refuse(
        "chunk_gated_delta_rule",
        {
            "head_first=True": head_first,
            "cu_seqlens=None": cu_seqlens is None,
            "initial_state=None": initial_state is None,
            "initial_state_indices=None": initial_state_indices is None,
        },
    )
    assert cu_seqlens is not None
    assert initial_state is not None
    assert initial_state_indices is not None
    chunks = _Chunks(cu_seqlens)
    # Padding tokens have q = k = v = g = beta = 0, which leaves the state unchanged.
    block = DeltaBlock.of(
        chunks.pad(q[0].float()),
        chunks.pad(k[0].float()),
        chunks.pad(v[0].float()),
        g_BCH=chunks.pad(g[0].float()),
        beta_BCH=chunks.pad(beta[0].float()),
        scale=scale,
        normalise=use_qk_l2norm_in_kernel,
    )
    slot_B = initial_state_indices.long()
    state_BHVK = initial_state[slot_B.clamp(min=0)].float() * (slot_B >= 0)[:, None, None, None]
    before_MHVK, delta_MHCV = _scan(block, chunks, state_BHVK)
    found_by_q, _ = block.read(before_MHVK.flatten(0, 1))
    out_THV = chunks.unpad(by_token(block.outputs(found_by_q, delta_MHCV.flatten(0, 1)), chunks.n_chunks))
    if inplace_update:
        kept_B = slot_B >= 0
        initial_state[slot_B[kept_B]] = state_BHVK[kept_B].to(initial_state.dtype)
    return out_THV.to(v.dtype)[None], None, before_MHVK[None]


def _scan(block: DeltaBlock, chunks: "_Chunks", state_BHVK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the sequences' states through their chunks, in place.

    A chunk's delta (see `gdn_block`) is from_values - from_state S_0^T, where S_0 is the state before the chunk.
    `from_values` and `from_state` do not depend on S_0, so one solve computes both for all chunks.

    Returns:
        The state before each chunk [M, H, V, K], and the delta of each chunk [M, H, C, V].
    """
    right = torch.cat([block.v_YCV, block.k_YCK * block.decay_YC[..., None]], dim=-1)
    from_values, from_state = chunks.of_rows(block.solve(right)).split_with_sizes(state_BHVK.shape[-2:], dim=-1)
    # The last row of `decay_YCC` has the decay from each token to the end of its chunk.
    to_end_MHCK = chunks.of_rows(block.k_YCK * block.decay_YCC[:, -1, :, None])
    end_decay_MH11 = chunks.of_rows(block.decay_YC[:, -1:, None])

    before = state_BHVK.new_empty(chunks.n_chunks, *state_BHVK.shape[1:])
    deltas = torch.empty_like(from_values)
    for rows, sequences in chunks.in_order():
        before[rows] = state = state_BHVK[sequences]
        deltas[rows] = delta = from_values[rows] - from_state[rows] @ state.transpose(-1, -2)
        state_BHVK[sequences] = state * end_decay_MH11[rows] + delta.transpose(-1, -2) @ to_end_MHCK[rows]
    return before, deltas


class _Chunks:
    """Chunks of 64 tokens of packed sequences, one row per chunk; each sequence's last chunk is padded."""

    def __init__(self, cu_seqlens: torch.Tensor) -> None:
        bounds = cu_seqlens.long()
        n_tokens_B = bounds.diff()
        self._n_chunks_B = (n_tokens_B + CHUNK - 1) // CHUNK
        self._first_B = self._n_chunks_B.cumsum(0) - self._n_chunks_B
        self.n_chunks = int(self._n_chunks_B.sum())
        n_tokens = int(bounds[-1])
        shift_B = self._first_B * CHUNK - bounds[:-1]
        self._cell_T = torch.arange(n_tokens) + shift_B.repeat_interleave(n_tokens_B, output_size=n_tokens)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Pad [T, ...] to [M, 64, ...]; tokens after the last sequence are dropped."""
        padded = x.new_zeros(self.n_chunks * CHUNK, *x.shape[1:])
        padded[self._cell_T] = x[: len(self._cell_T)]
        return padded.unflatten(0, (self.n_chunks, CHUNK))

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Remove the padding: [M, 64, ...] to [T, ...]."""
        return x.flatten(0, 1)[self._cell_T]

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return [Y, ...] as [M, H, ...]."""
        return x.unflatten(0, (self.n_chunks, -1))

    def in_order(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each chunk number j the rows of the sequences' j-th chunks, and the indices of these sequences."""
        steps = []
        for j in range(max(self._n_chunks_B.tolist(), default=0)):
            sequences = (self._n_chunks_B > j).nonzero().flatten()
            steps.append((self._first_B[sequences] + j, sequences))
        return steps


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one token of B sequences: mixed_qkv [B, 2 G K + H V], a and b [B, H], states in `initial_state`.

    Writes the states [S, H, V, K] at `ssm_state_indices` and `out` [B, 1, H, V] in place; returns `out` and the states.
    Padding requests, whose state slot is negative, return zeros.
    """
    B = n_real(ssm_state_indices)
    out[B:] = 0
    whole, out = out, out[:B]
    mixed_qkv, a, b, ssm_state_indices = mixed_qkv[:B], a[:B], b[:B], ssm_state_indices[:B]
    H, V, K = initial_state.shape[1:]
    G = (mixed_qkv.shape[1] - H * V) // (2 * K)
    qk_BF, v_BF = mixed_qkv.float().split_with_sizes([2 * G * K, H * V], dim=1)
    qk_BJGK = qk_BF.view(B, 2, G, K)
    if use_qk_l2norm_in_kernel:
        qk_BJGK = l2_normalised(qk_BJGK)
    # `reshape` copies, because batched multiplication needs a uniform stride between heads.
    q_XK, k_XK = qk_BJGK.transpose(0, 1).reshape(2, B * G, K)
    slot_B = ssm_state_indices.long()
    state_BHVK = initial_state.index_select(0, slot_B).float()
    state_BHVK *= log_decay(A_log, a, dt_bias).exp_()[..., None, None]

    # The states of value heads that share a key head are stacked as rows of one matrix, so no key is repeated.
    state_XYK = state_BHVK.view(B * G, -1, K)
    found_BHV = torch.bmm(state_XYK, k_XK[..., None]).view(B, H, V)
    delta_BHV = (v_BF.view(B, H, V) - found_BHV).mul_(b.float().sigmoid()[..., None])
    state_XYK.baddbmm_(delta_BHV.view(B * G, -1, 1), k_XK[:, None])
    torch.mul(torch.bmm(state_XYK, q_XK[..., None]).view(out.shape), scale, out=out)
    initial_state.index_copy_(0, slot_B, state_BHVK.to(initial_state.dtype))
    return whole, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    **others: object,
) -> torch.Tensor:
    """Process the next C tokens of each of B sequences: a block in verify, or one token in a decode with split q, k, v.

    q, k [1, B C, G, K], v [1, B C, H, V], a and b [B C, H]; B includes padding. States are `initial_state_source`
    [S, H, V, K], read and written at slot `initial_state_indices[b]`. With `intermediate_states_buffer`
    [rows, >= C, H, V, K] the state after every token is stored in row `intermediate_state_indices[b]`. With
    `disable_state_update` the sequence's state slot is unchanged.

    Returns:
        Outputs [1, B C, H, V], NaN for padding sequences, whose state slot is negative.
    Raises:
        NotImplementedError: sequences of unequal lengths, or an argument that the CPU platform lacks.
        ValueError: a padding sequence precedes a real one.
    """
    op = "fused_sigmoid_gating_delta_rule_update"
    refuse(op, others)
    without_rows = intermediate_states_buffer is not None and intermediate_state_indices is None
    refuse(op, {"no cu_seqlens": cu_seqlens is None, "no intermediate_state_indices": without_rows})
    n_sequences, n_tokens = initial_state_indices.shape[0], v.shape[1]
    C = n_tokens // n_sequences
    B = n_real(initial_state_indices)
    assert cu_seqlens is not None
    refuse(op, {"cu_seqlens of unequal lengths": cu_seqlens[: B + 1].tolist() != list(range(0, B * C + 1, C))})
    if not B:
        return torch.full_like(v, torch.nan)
    q, k, v = (x[:, : B * C] for x in (q, k, v))
    a, b = a[: B * C], b[: B * C]
    slot_B = initial_state_indices[:B].long()
    g_TH = log_decay(A_log, a, dt_bias, beta=softplus_beta, threshold=softplus_threshold)
    block = DeltaBlock.of(
        q.view(B, C, *q.shape[2:]),
        k.view(B, C, *k.shape[2:]),
        v.view(B, C, *v.shape[2:]),
        g_BCH=g_TH.view(B, C, v.shape[2]),
        beta_BCH=b.reshape(B, C, v.shape[2]).float().sigmoid(),
        scale=scale,
        normalise=use_qk_l2norm_in_kernel,
    )
    state_YVK = initial_state_source.index_select(0, slot_B).float().flatten(0, 1)
    found_by_q, found_by_k = block.read(state_YVK)
    delta_YCV = block.solve(block.v_YCV - found_by_k)
    if intermediate_states_buffer is not None or not disable_state_update:
        after_BCHVK = _states(
            block, state_YVK, delta_YCV, intermediate_states_buffer, intermediate_state_indices, n_blocks=B
        )
        if not disable_state_update:
            initial_state_source.index_copy_(0, slot_B, after_BCHVK[:, -1].to(initial_state_source.dtype))
    out_TH = by_token(block.outputs(found_by_q, delta_YCV), B).to(v.dtype).reshape(v.shape[1:])
    return with_padding(out_TH, n_tokens)[None]


def _states(
    block: DeltaBlock,
    state_YVK: torch.Tensor,
    delta_YCV: torch.Tensor,
    buffer: torch.Tensor | None,
    row_B: torch.Tensor | None,
    *,
    n_blocks: int,
) -> torch.Tensor:
    """Return the state after every token, [B, C, H, V, K]. If there is a `buffer`, store the states in rows `row_B`."""
    B, C = n_blocks, delta_YCV.shape[1]
    rows = None if row_B is None else row_B[:B].tolist()
    # If the rows are 0 .. B-1, as without pipeline parallelism, states are computed directly in an fp32 buffer.
    in_place = buffer is not None and rows == list(range(B)) and buffer.dtype == torch.float32
    if buffer is not None and in_place:
        after = buffer[:B, :C]
    else:
        after = state_YVK.new_empty(B, C, len(state_YVK) // B, *state_YVK.shape[1:])
    block.states(state_YVK, delta_YCV, out_BCHVK=after)
    if buffer is not None and row_B is not None and not in_place:
        buffer[row_B[:B].long(), :C] = after.to(buffer.dtype)
    return after
