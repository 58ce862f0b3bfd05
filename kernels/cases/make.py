"""Cases of every kernel: inputs, the least number of bytes to move, and a check against the kernel's definition.

`tests/kernels` checks the cases at small sizes. `sglang_dflash.tools.prove` checks and times them.
"""

import torch
from sglang_dflash_kernels.accept import accept, accept_ref
from sglang_dflash_kernels.append_context import ContextCaches, KeyTransform, append_context, append_context_ref
from sglang_dflash_kernels.block_conv import block_conv, block_conv_ref
from sglang_dflash_kernels.cases.sizes import ROUNDING, Case, Sizes, assert_close, assert_equal
from sglang_dflash_kernels.copy_draft import N_CLASSES, Texts, copy_draft, copy_draft_ref
from sglang_dflash_kernels.gdn_fold import Kept, gdn_fold, gdn_fold_ref
from sglang_dflash_kernels.gdn_verify import Inputs, gdn_verify, gdn_verify_ref
from sglang_dflash_kernels.penalise import Asked, penalise_, penalise_ref
from sglang_dflash_kernels.plan_block import plan_block, plan_block_ref
from sglang_dflash_kernels.record import record_width
from sglang_dflash_kernels.select_path import select_path, select_path_ref
from sglang_dflash_kernels.weigh_copies import weigh_copies, weigh_copies_ref

TRACK_INTERVAL = 256  # tokens, SGLang's default
PERIOD = 61  # tokens after which a text repeats; so places before the first wrong guess have matches of LONGEST tokens


def plan_block_case(B: int, N: int, sizes: Sizes, device: str) -> Case:
    n_columns = sizes.n_positions
    args = (
        torch.randint(sizes.n_vocab, (B,), device=device),
        torch.randint(n_columns - N, (B,), device=device),
        torch.randperm(2 * B, device=device)[:B],
        torch.randint(1, sizes.n_slots, (2 * B, n_columns), device=device, dtype=torch.int32),
    )

    def launch() -> tuple[torch.Tensor, ...]:
        return plan_block(*args, mask_token_id=sizes.n_vocab - 1, n_tokens=N)

    def check() -> None:
        assert_equal(launch(), plan_block_ref(*args, mask_token_id=sizes.n_vocab - 1, n_tokens=N))

    return Case("plan_block", f"B={B} N={N}", B * 32 + B * N * (4 + 24), launch, check)


def accept_case(B: int, N: int, sizes: Sizes, device: str) -> Case:
    tokens_BN = torch.randint(sizes.n_vocab, (B, N), device=device)
    target_BN = tokens_BN.roll(-1, dims=1)
    target_BN[torch.arange(B), torch.randint(N, (B,))] = -1  # rejects the next slot's draft; the last slot has none
    args = tokens_BN, target_BN, torch.randint(sizes.n_positions, (B,), device=device), TRACK_INTERVAL

    def launch() -> tuple[torch.Tensor, ...]:
        return accept(*args)

    def check() -> None:
        assert_equal(launch(), accept_ref(*args))

    return Case("accept", f"B={B} N={N}", B * (8 + 40) + B * N * 24, launch, check)


def penalise_case(B: int, N: int, V: int, device: str) -> Case:
    """Create a case in which all B requests have every penalty. Repeated launches penalise the same logits further."""
    logits_BNV, index_B = torch.randn(B, N, V, device=device), torch.arange(B, device=device)
    tokens_BN, stop_BE = torch.randint(V, (B, N), device=device), torch.randint(V, (B, 2), device=device)
    counts_BV = (torch.rand(B, V, device=device) < 1e-3).int()
    rates = (torch.full((B,), rate, device=device) for rate in (0.1, 0.2, 1.1))
    asked = Asked(index_B, index_B, *rates, min_new_P=index_B % 20, stop_PE=stop_BE)
    args = tokens_BN, index_B, counts_BV, asked

    def launch() -> None:
        penalise_(logits_BNV, *args)

    def check() -> None:
        got, want = logits_BNV.clone(), logits_BNV.clone()
        penalise_(got, *args)
        penalise_ref(want, *args)
        assert_close(*(logits.nan_to_num(neginf=-1e2) for logits in (got, want)), within=ROUNDING)

    return Case("penalise", f"B={B} N={N}", (8 * N + 4) * B * V, launch, check)


def append_context_case(n_rows: int, caches: ContextCaches, sizes: Sizes, *, B: int | None = None) -> Case:
    """Create a prefill of `n_rows` tokens as a case; with B, a decode step that keeps some rows of each request."""
    device = caches.k_L[0].device
    L, G, E = sizes.n_layers, sizes.n_heads, sizes.head_dim
    kv_TL2GE = torch.randn(n_rows, L, 2, G, E, device=device).to(sizes.dtype)
    rows = (
        kv_TL2GE[:, :, 0],
        kv_TL2GE[:, :, 1],
        torch.randint(sizes.n_positions, (n_rows,), device=device),
        torch.randperm(sizes.n_slots, device=device)[:n_rows],
    )
    angles = torch.rand(sizes.n_positions, E // 2, device=device) * 7
    weight_LE = torch.rand(L, E, device=device).to(sizes.dtype)
    key = KeyTransform(torch.cat((angles.cos(), angles.sin()), dim=1), weight_LE, 1e-6)
    N = n_rows // (B or 1)
    n_kept_B = None if B is None else torch.randint(1, N + 1, (B,), device=device, dtype=torch.int32)
    n_kept = n_rows if n_kept_B is None else int(n_kept_B.sum())

    def launch() -> None:
        append_context(*rows, caches=caches, key=key, n_kept_B=n_kept_B)

    def check() -> None:
        got, want, exact = copied(caches, sizes.dtype), copied(caches, sizes.dtype), copied(caches, torch.float32)
        append_context(*rows, caches=got, key=key, n_kept_B=n_kept_B)
        append_context_ref(*rows, caches=want, key=key, n_kept_B=n_kept_B)
        exact_rows = rows[0].float(), rows[1].float(), *rows[2:]
        append_context_ref(*exact_rows, caches=exact, key=key, n_kept_B=n_kept_B)
        assert_equal(got.v_L, want.v_L)
        for got_k, want_k, exact_k in zip(got.k_L, want.k_L, exact.k_L, strict=True):
            bound = max(2 * worst(want_k, exact_k), ROUNDING * exact_k.abs().max().item())
            assert worst(got_k, exact_k) <= bound, "K differs by more than rounding"

    per_row = L * 2 * G * E * 2 * kv_TL2GE.element_size() + E * 4 + 16
    shape = f"T={n_rows}" if B is None else f"B={B} N={N} kept={n_kept}"
    return Case("append_context", shape, n_kept * per_row, launch, check)


def gdn_cases(B: int, N: int, state_LSHVK: torch.Tensor, sizes: Sizes) -> list[Case]:
    """Create a case of `gdn_verify` in one layer, and one of `gdn_fold` in all layers with random kept lengths."""
    shape = sizes.recurrent
    L, H, G, V, K = shape
    device, T = state_LSHVK.device, B * N
    heads = ((G, K), (G, K), (H, V), (H,), (H,))
    q, k, v, a, b = (torch.randn(T, *size, device=device).to(sizes.dtype) for size in heads)
    x = Inputs(q, k, v, a, b, torch.rand(H, device=device), torch.rand(H, device=device))
    slot_B = torch.randperm(state_LSHVK.shape[1], device=device)[:B]
    record_LBNX = torch.zeros(L, B, N, record_width(H, V, G, K), device=device)
    for layer, record in enumerate(record_LBNX):
        gdn_verify_ref(x, state_LSHVK[layer], slot_B, record)
    kept = Kept(slot_B, torch.randint(1, N + 1, (B,), device=device))

    def verify() -> torch.Tensor:
        return gdn_verify(x, state_LSHVK[0], slot_B, record_LBNX[0])

    def check_verify() -> None:
        records = record_LBNX[0].clone(), record_LBNX[0].clone()
        runs = zip((gdn_verify, gdn_verify_ref), records, strict=True)
        got, want = (run(x, state_LSHVK[0], slot_B, record) for run, record in runs)
        assert_close(*records, within=ROUNDING)
        assert_close(got.float(), want.float(), within=2**-8)  # the relative error of rounding to bf16

    def fold() -> None:
        gdn_fold(state_LSHVK, record_LBNX, kept, n_key_heads=G)

    def check_fold() -> None:
        states = state_LSHVK.clone(), state_LSHVK.clone()
        for run, state in zip((gdn_fold, gdn_fold_ref), states, strict=True):
            run(state, record_LBNX, kept, n_key_heads=G)
        assert_close(*states, within=ROUNDING)

    # Bytes of q, k, v, a and b, and of the outputs, which are as large as v.
    n_kept, inputs = int(kept.n_B.sum()), q.element_size() * T * (2 * G * K + 2 * H * V + 2 * H)
    verify_bytes = B * shape.state_bytes + T * shape.record_bytes + inputs
    fold_bytes = L * (2 * B * shape.state_bytes + n_kept * shape.record_bytes)
    return [
        Case("gdn_verify", f"B={B} N={N}, a layer", verify_bytes, verify, check_verify),
        Case("gdn_fold", f"B={B} N={N} kept={n_kept}", fold_bytes, fold, check_fold),
    ]


def block_conv_case(B: int, N: int, sizes: Sizes, device: str) -> Case:
    """Create a case of one convolution. A draft layer has four: before and after each of its two sublayers."""
    S, H, J, _, _ = sizes.second
    change_T2SJ, base_2SH = torch.randn(B * N, 2, S, J, device=device), torch.randn(2, S, H, device=device)
    x_TH = torch.randn(B * N, H, device=device).to(sizes.dtype)
    args = x_TH, change_T2SJ.to(sizes.dtype)[:, 1], base_2SH.to(sizes.dtype)[1]

    def launch() -> torch.Tensor:
        return block_conv(*args, block_size=N)

    def check() -> None:
        exact = block_conv_ref(*(tensor.float() for tensor in args), block_size=N)
        bound = ROUNDING if sizes.dtype == torch.float32 else 2**-8  # the relative error of rounding to bf16
        assert_close(launch().float(), exact, within=bound)

    n_values = B * N * (2 * H + S * J) + S * H
    return Case("block_conv", f"B={B} N={N}, a side", n_values * x_TH.element_size(), launch, check)


def select_path_case(B: int, N: int, sizes: Sizes, device: str) -> Case:
    """Create a case with values -1, 0 and 1. Sums are exact, so drafts must equal the definition's even on ties."""
    (_, _, _, K, R), V, D = sizes.second, sizes.n_vocab, N - 1

    def values(*size: int) -> torch.Tensor:
        return torch.randint(-1, 2, size, device=device, dtype=torch.int8).to(sizes.dtype)

    candidates_BDK = torch.randint(V, (B, D, K), device=device)
    args = candidates_BDK, values(B, D, K).float(), values(B, D, R), torch.randint(V, (B,), device=device)
    predecessor_VR, successor_VR = values(V, R), values(V, R)

    def launch() -> torch.Tensor:
        return select_path(*args, predecessor_VR=predecessor_VR, successor_VR=successor_VR)

    def check() -> None:
        want = select_path_ref(*args, predecessor_VR=predecessor_VR, successor_VR=successor_VR)
        assert_equal((launch(),), (want,))

    n_bytes = B * D * (R * (K + 2) * successor_VR.element_size() + 12 * K + 8) + 8 * B
    return Case("select_path", f"B={B} N={N}", n_bytes, launch, check)


def copy_cases(B: int, N: int, sizes: Sizes, device: str) -> list[Case]:
    """Create cases of `copy_draft` and `weigh_copies`. Texts fill four fifths of the positions (32,768 of 40,960).

    Repeated launches write the same tokens.
    """
    n_text = sizes.n_positions * 4 // 5
    words_P = torch.randint(sizes.n_vocab, (PERIOD,), device=device, dtype=torch.int32)
    text_QM = words_P.repeat(-(-sizes.n_positions // PERIOD))[: sizes.n_positions].repeat(2 * B, 1)
    texts = Texts(
        prefix_len_B=torch.full((B,), n_text, device=device),
        rows_B=torch.randperm(2 * B, device=device)[:B],
        text_QM=text_QM,
        counts_QK2=torch.zeros(2 * B, N_CLASSES, 2, dtype=torch.int32, device=device),
    )
    tokens_BN = text_QM[texts.rows_B, n_text : n_text + N].long()
    tokens_BN[:, N // 2 :] = sizes.n_vocab - 1  # guesses from slot N // 2 on are wrong
    committed_BN = text_QM[texts.rows_B, n_text + 1 : n_text + N + 1].long()
    n_committed_B = torch.full((B,), N, dtype=torch.int32, device=device)
    copied, totals_K2 = copy_draft(tokens_BN, texts), torch.zeros_like(texts.counts_QK2[0])

    def copy() -> object:
        return copy_draft(tokens_BN, texts)

    def check_copy() -> None:
        got, its = copy_draft(tokens_BN, texts), Texts(*(tensor.cpu() for tensor in texts))
        want = copy_draft_ref(tokens_BN.cpu(), its)
        assert_equal((*(field.cpu() for field in got), texts.text_QM.cpu()), (*want, its.text_QM))

    step = tokens_BN, copied, committed_BN, n_committed_B

    def weigh() -> None:
        weigh_copies(*step, texts, totals_K2=totals_K2)

    def check_weigh() -> None:
        results = []
        for run in (weigh_copies, weigh_copies_ref):
            fresh = torch.zeros_like(texts.counts_QK2), torch.zeros_like(totals_K2)
            run(*step, texts._replace(counts_QK2=fresh[0]), totals_K2=fresh[1])
            results.append(fresh)
        assert_equal(*results)

    D = N - 1
    copy_bytes = B * (4 * n_text + 20 * N + 8 * D + 8 * N_CLASSES + 20)
    weigh_bytes = B * (16 * N + 12 * D + 16 * N_CLASSES + 40)
    return [
        Case("copy_draft", f"B={B} N={N}, {n_text} tokens", copy_bytes, copy, check_copy),
        Case("weigh_copies", f"B={B} N={N}", weigh_bytes, weigh, check_weigh),
    ]


def launch_case(device: str) -> Case:
    cell = torch.empty(1, device=device)
    return Case("launch", "one cell", 4, cell.zero_, lambda: None)


def copied(caches: ContextCaches, dtype: torch.dtype) -> ContextCaches:
    return ContextCaches.build(*([c.to(dtype, copy=True) for c in layers] for layers in (caches.k_L, caches.v_L)))


def worst(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got.float() - exact).abs().max().item()


def make_cases(sizes: Sizes, device: str) -> list[Case]:
    torch.manual_seed(0)
    size = sizes.n_slots, sizes.n_heads, sizes.head_dim
    layers = [torch.randn(*size, device=device).to(sizes.dtype) for _ in range(2 * sizes.n_layers)]
    caches = ContextCaches.build(layers[: sizes.n_layers], layers[sizes.n_layers :])
    L, H, _, V, K = sizes.recurrent
    states = torch.randn(L, max(sizes.batches) + 1, H, V, K, device=device)
    shapes = [(B, N) for N in sizes.blocks for B in sizes.batches]
    return [
        launch_case(device),
        *(plan_block_case(B, N, sizes, device) for B, N in shapes),
        *(accept_case(B, N, sizes, device) for B, N in shapes),
        *(penalise_case(B, N, sizes.n_vocab, device) for B, N in shapes),
        *(append_context_case(B * N, caches, sizes, B=B) for B, N in shapes),
        *(append_context_case(T, caches, sizes) for T in sizes.prefills),
        *(case for B, N in shapes for case in gdn_cases(B, N, states, sizes)),
        *(block_conv_case(B, N, sizes, device) for B, N in shapes),
        *(select_path_case(B, N, sizes, device) for B, N in shapes),
        *(case for B, N in shapes for case in copy_cases(B, N, sizes, device)),
    ]
