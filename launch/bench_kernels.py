"""Time each kernel at the sizes of a 27B target and its draft, beside the bytes it cannot avoid moving.

    python launch/bench_kernels.py [--rounds 200]

Every case is first compared with its definition on the same inputs; nothing is timed unless all agree. Then rounds
over all cases, one launch of each per round, so that clocks and neighbours disturb all alike; medians over rounds.
One launch is timed by CUDA events behind a 1 GiB overwrite, which empties the L2 cache and keeps the device busy
until the launch is queued, so host time is not in the figure. The row `launch` times a one-cell fill: what any
launch costs here. The byte floor is a case's bytes over the copy bandwidth measured in the same run.

Needs a CUDA device. The last line of stdout is one JSON document; the table goes before it.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from sglang_dflash_kernels.accept import accept, accept_ref
from sglang_dflash_kernels.append_context import ContextCaches, KeyTransform, append_context, append_context_ref
from sglang_dflash_kernels.gdn_fold import Kept, gdn_fold, gdn_fold_ref
from sglang_dflash_kernels.gdn_verify import Inputs, gdn_verify, gdn_verify_ref
from sglang_dflash_kernels.penalise import Asked, penalise_, penalise_ref
from sglang_dflash_kernels.plan_block import plan_block, plan_block_ref
from sglang_dflash_kernels.record import record_width

BATCHES, BLOCKS, PREFILLS = (1, 8, 32, 64), (8, 16), (2048, 8192)
N_LAYERS, N_HEADS, HEAD_DIM, N_SLOTS, N_POSITIONS = 5, 8, 128, 32768, 40960
MASK_TOKEN_ID, ROW_LEN, N_VOCAB = 248070, 40960, 248320
OVERWRITE_BYTES = 1 << 30
ROUNDING = 1e-5  # of the largest value: fp32 sums in another order


class Recurrent(NamedTuple):
    """The recurrent layers of a target: how many, value and key heads, width of a value and of a key."""

    L: int
    H: int
    G: int
    V: int
    K: int

    @property
    def state_bytes(self) -> int:
        """Of a layer."""
        return 4 * self.H * self.V * self.K

    @property
    def record_bytes(self) -> int:
        """Of a layer and token."""
        return 4 * record_width(self.H, self.V, self.G, self.K)


QWEN_27B = Recurrent(L=48, H=48, G=16, V=128, K=128)


class Case(NamedTuple):
    op: str
    shape: str
    n_bytes: int  # read once and written once
    launch: Callable[[], object]
    check: Callable[[], None]  # raises AssertionError unless the kernel does what its definition says


def plan_block_case(B: int, N: int, device: str) -> Case:
    args = (
        torch.randint(N_VOCAB, (B,), device=device),
        torch.randint(ROW_LEN - N, (B,), device=device),
        torch.randperm(2 * B, device=device)[:B],
        torch.randint(1, N_SLOTS, (2 * B, ROW_LEN), device=device, dtype=torch.int32),
    )

    def launch() -> tuple[torch.Tensor, ...]:
        return plan_block(*args, mask_token_id=MASK_TOKEN_ID, n_tokens=N)

    def check() -> None:
        assert_equal(launch(), plan_block_ref(*args, mask_token_id=MASK_TOKEN_ID, n_tokens=N))

    return Case("plan_block", f"B={B} N={N}", B * 24 + B * N * (4 + 24), launch, check)


def accept_case(B: int, N: int, device: str) -> Case:
    tokens_BN = torch.randint(N_VOCAB, (B, N), device=device)
    target_BN = tokens_BN.roll(-1, dims=1)
    target_BN[torch.arange(B), torch.randint(N, (B,))] = -1  # a rejection somewhere in each row
    args = tokens_BN, target_BN, torch.randint(ROW_LEN, (B,), device=device)

    def launch() -> tuple[torch.Tensor, ...]:
        return accept(*args)

    def check() -> None:
        assert_equal(launch(), accept_ref(*args))

    return Case("accept", f"B={B} N={N}", B * (8 + 24) + B * N * 24, launch, check)


def penalise_case(B: int, N: int, V: int, device: str) -> Case:
    """All B requests ask for every penalty; launches go on from the last one's logits, which costs the same."""
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


def append_context_case(n_rows: int, caches: ContextCaches, *, B: int | None = None) -> Case:
    """`n_rows` of one prefill, or with `B` of B requests of which a random part is kept."""
    device = caches.k_L[0].device
    kv_TL2GE = torch.randn(n_rows, N_LAYERS, 2, N_HEADS, HEAD_DIM, device=device).bfloat16()
    rows = (
        kv_TL2GE[:, :, 0],
        kv_TL2GE[:, :, 1],
        torch.randint(N_POSITIONS, (n_rows,), device=device),
        torch.randperm(N_SLOTS, device=device)[:n_rows],
    )
    angles = torch.rand(N_POSITIONS, HEAD_DIM // 2, device=device) * 7
    weight_LE = torch.rand(N_LAYERS, HEAD_DIM, device=device).bfloat16()
    key = KeyTransform(torch.cat((angles.cos(), angles.sin()), dim=1), weight_LE, 1e-6)
    N = n_rows // (B or 1)
    n_kept_B = None if B is None else torch.randint(1, N + 1, (B,), device=device, dtype=torch.int32)
    n_kept = n_rows if B is None else int(n_kept_B.sum())

    def launch() -> None:
        append_context(*rows, caches=caches, key=key, n_kept_B=n_kept_B)

    def check() -> None:
        got, want, exact = copied(caches, torch.bfloat16), copied(caches, torch.bfloat16), copied(caches, torch.float32)
        append_context(*rows, caches=got, key=key, n_kept_B=n_kept_B)
        append_context_ref(*rows, caches=want, key=key, n_kept_B=n_kept_B)
        exact_rows = rows[0].float(), rows[1].float(), *rows[2:]
        append_context_ref(*exact_rows, caches=exact, key=key, n_kept_B=n_kept_B)
        assert_equal(got.v_L, want.v_L)
        for got_k, want_k, exact_k in zip(got.k_L, want.k_L, exact.k_L, strict=True):
            assert worst(got_k, exact_k) <= 2 * worst(want_k, exact_k), "K is off by more than bf16 costs"

    per_row = N_LAYERS * 2 * N_HEADS * HEAD_DIM * (2 + 2) + HEAD_DIM * 4 + 16
    shape = f"T={n_rows}" if B is None else f"B={B} N={N} kept={n_kept}"
    return Case("append_context", shape, n_kept * per_row, launch, check)


def gdn_cases(B: int, N: int, state_LSHVK: torch.Tensor, shape: Recurrent) -> list[Case]:
    """Verify of one layer, with its record, and the fold of all: a random part of each block is kept, none tracked."""
    L, H, G, V, K = shape
    device, T = state_LSHVK.device, B * N
    heads = ((G, K), (G, K), (H, V), (H,), (H,))
    q, k, v, a, b = (torch.randn(T, *size, device=device).bfloat16() for size in heads)
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
        assert_close(got.float(), want.float(), within=2**-8)  # rounded to bf16

    def fold() -> None:
        gdn_fold(state_LSHVK, record_LBNX, kept, n_key_heads=G)

    def check_fold() -> None:
        states = state_LSHVK.clone(), state_LSHVK.clone()
        for run, state in zip((gdn_fold, gdn_fold_ref), states, strict=True):
            run(state, record_LBNX, kept, n_key_heads=G)
        assert_close(*states, within=ROUNDING)

    n_kept, inputs = int(kept.n_B.sum()), 2 * T * (2 * G * K + 2 * H * V + 2 * H)  # and the outputs
    verify_bytes = B * shape.state_bytes + T * shape.record_bytes + inputs
    fold_bytes = L * (2 * B * shape.state_bytes + n_kept * shape.record_bytes)
    return [
        Case("gdn_verify", f"B={B} N={N}, a layer", verify_bytes, verify, check_verify),
        Case("gdn_fold", f"B={B} N={N} kept={n_kept}", fold_bytes, fold, check_fold),
    ]


def launch_case(device: str) -> Case:
    cell = torch.empty(1, device=device)
    return Case("launch", "one cell", 4, cell.zero_, lambda: None)


def copied(caches: ContextCaches, dtype: torch.dtype) -> ContextCaches:
    return ContextCaches.build(*([c.to(dtype, copy=True) for c in layers] for layers in (caches.k_L, caches.v_L)))


def assert_equal(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for i, (got_field, want_field) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(got_field, want_field), f"result {i} differs from the definition's"


def assert_close(got: torch.Tensor, want: torch.Tensor, *, within: float) -> None:
    error = (got - want).abs().max().item() / want.abs().max().item()
    assert error <= within, f"off from the definition by {error:.1e} of the largest value, not {within:.1e}"


def worst(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got.float() - exact).abs().max().item()


def make_cases(device: str) -> list[Case]:
    torch.manual_seed(0)
    layers = [torch.randn(N_SLOTS, N_HEADS, HEAD_DIM, device=device).bfloat16() for _ in range(2 * N_LAYERS)]
    caches = ContextCaches.build(layers[:N_LAYERS], layers[N_LAYERS:])
    states = torch.randn(QWEN_27B.L, max(BATCHES) + 1, QWEN_27B.H, QWEN_27B.V, QWEN_27B.K, device=device)
    sizes = [(B, N) for N in BLOCKS for B in BATCHES]
    return [
        launch_case(device),
        *(plan_block_case(B, N, device) for B, N in sizes),
        *(accept_case(B, N, device) for B, N in sizes),
        *(penalise_case(B, N, N_VOCAB, device) for B, N in sizes),
        *(append_context_case(B * N, caches, B=B) for B, N in sizes),
        *(append_context_case(T, caches) for T in PREFILLS),
        *(case for B, N in sizes for case in gdn_cases(B, N, states, QWEN_27B)),
    ]


def time_us(launch: Callable[[], object], overwritten: torch.Tensor) -> Callable[[], float]:
    """Queue one launch between two events; the call returned reads the time once the device is through."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    overwritten.zero_()
    start.record()
    launch()
    end.record()
    return lambda: start.elapsed_time(end) * 1000


def measure(launches: list[Callable[[], object]], n_rounds: int) -> list[list[float]]:
    """Microseconds of every launch in every round, after a tenth as many rounds of warm-up."""
    overwritten = torch.empty(OVERWRITE_BYTES, dtype=torch.uint8, device="cuda")
    rounds = []
    for _ in range(n_rounds + n_rounds // 10):
        pending = [time_us(launch, overwritten) for launch in launches]
        torch.cuda.synchronize()
        rounds.append([read() for read in pending])
    return [list(times) for times in zip(*rounds[-n_rounds:], strict=True)]


def summary(case: Case, times_us: list[float], bytes_per_us: float) -> dict[str, str | float]:
    us, floor_us = statistics.median(times_us), case.n_bytes / bytes_per_us
    p10_us, *_, p90_us = statistics.quantiles(times_us, n=10)
    sizes = {"op": case.op, "shape": case.shape, "bytes": case.n_bytes}
    times = {"us": us, "p10_us": p10_us, "p90_us": p90_us}
    return sizes | times | {"gb_per_s": case.n_bytes / us / 1000, "share_of_floor": floor_us / us}


def print_table(results: list[dict[str, str | float]]) -> None:
    print(f"{'op':<16}{'shape':<24}{'us':>9}{'p10':>9}{'p90':>9}{'GB/s':>9}{'of floor':>10}")
    for row in results:
        times = "".join(f"{row[name]:>9.2f}" for name in ("us", "p10_us", "p90_us"))
        print(f"{row['op']:<16}{row['shape']:<24}{times}{row['gb_per_s']:>9.0f}{row['share_of_floor']:>10.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    n_rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels found no CUDA device; run it on a machine with one")
    cases = make_cases("cuda")
    for case in cases:
        case.check()
    source, copy = (torch.empty(OVERWRITE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_times, *times = measure([lambda: copy.copy_(source), *(case.launch for case in cases)], n_rounds)
    bytes_per_us = 2 * OVERWRITE_BYTES / statistics.median(copy_times)
    results = [summary(case, times_us, bytes_per_us) for case, times_us in zip(cases, times, strict=True)]
    print_table(results)
    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "n_rounds": n_rounds,
        "l2": "flushed before every launch",
        "copy_gb_per_s": bytes_per_us / 1000,
        "results": results,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
