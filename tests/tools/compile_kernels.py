"""Compile every kernel for GPUs that are not present, and read the machine code.

    python -m tests.tools.compile_kernels [--archs 80 86 89 90 100 120] [--short]

The package's launch functions run on meta tensors with the sizes of published models, so dtypes, strides and
specialisations equal those of a server. With `Driver`, Triton compiles but does not launch.

The command fails if a kernel:
- does not compile, or compiles although `config` refuses to serve it;
- spills registers, or needs more registers than `REGISTERS` allows;
- is compiled again though `sglang_dflash_kernels.specialisations` lists nothing new: a server would compile while
  serving;
- is not compiled again though `specialisations` lists something new.

Columns:
- `warps` of a program
- `registers` and bytes of `stack` of a thread
- bytes of `shared` memory of a program
- `resident` programs per multiprocessor
- `waves`: programs of the launch, divided by the programs that the GPU runs at once
- number of `instructions`, and of these the `tensor`-core instructions
- `loops`: number of instructions of each innermost loop

The last line of stdout is one JSON document.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Hashable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from sglang_dflash_kernels import (
    accept,
    append_context,
    block_conv,
    copy_draft,
    gdn_fold,
    gdn_verify,
    penalise,
    plan_block,
    select_path,
    specialisations,
    weigh_copies,
)
from sglang_dflash_kernels.cases.sizes import QWEN_27B, Second
from sglang_dflash_kernels.record import record_width
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from sglang_dflash.engine.memory import sizes
from sglang_dflash.tools.capacity import geometry
from sglang_dflash.tools.capacity import known_models as models
from tests.tools import sass

MODELS = ("Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3-Coder-Next")
WIDTHS = (1, 2, 4, 6, 8, 12, 16)
WIDE = (24, 32)  # blocks extended by n-gram copies
BLOCKS = (8, 16)
BATCHES = (1, 2, 3, 8, 16, 64)
VOCABULARY, MASK_TOKEN_ID, TABLE_ROWS, CONTEXT, N_STATES = 248320, 248070, 65, 40980, 65
TRACK_INTERVAL = 256  # tokens
I32, I64, F32, BF16 = torch.int32, torch.int64, torch.float32, torch.bfloat16
KERNELS = {
    name: vars(import_module(f"sglang_dflash_kernels.{name}"))[f"_{name}_kernel"] for name in specialisations.KERNELS
}
REGISTERS = {
    "plan_block": 40, "accept": 32, "penalise": 48, "append_context": 40, "gdn_verify": 192, "gdn_fold": 104,
    "block_conv": 80, "select_path": 80,
    "copy_draft": 96, "weigh_copies": 56,  # 96 registers: five copy_draft programs of 4 warps fit on a multiprocessor
}  # fmt: skip


class Device(NamedTuple):
    """Number of multiprocessors and the capacity of one, from NVIDIA's documentation."""

    n_multiprocessors: int
    shared_bytes: int
    program_shared_bytes: int
    registers: int = 65536
    warps: int = 64

    def resident(self, n_registers: int, n_warps: int, shared: int) -> int:
        """Return how many programs fit on a multiprocessor at once; a warp gets registers in units of 256."""
        per_warp = -(-n_registers * 32 // 256) * 256
        by_registers = self.registers // (per_warp * n_warps)
        return min(by_registers, self.warps // n_warps, self.shared_bytes // (shared + 1024), 32)


DEVICES = {
    80: Device(108, 164 << 10, 166912),  # A100
    86: Device(82, 100 << 10, 101376, warps=48),  # RTX 3090
    89: Device(128, 100 << 10, 101376, warps=48),  # RTX 4090
    90: Device(132, 228 << 10, 232448),  # H200
    100: Device(148, 228 << 10, 232448),  # B200
    120: Device(170, 100 << 10, 101376, warps=48),  # RTX 5090
}

OTHERS = (Second(S=4, H=2048, J=16, K=10, R=64), Second(S=3, H=2880, J=90, K=1, R=96))  # sizes of no published draft


class KernelLaunch(NamedTuple):
    kernel: str
    detail: str
    specialisation: Hashable  # key in `specialisations`
    run: Callable[[], object]
    fixed: Hashable = ()  # sizes that are constant on a server, so each value is another server's specialisation
    refused: bool = False  # must not compile, because `config` refuses to serve it
    wide: bool = False  # more slots than a block (n-gram copies); no limit on registers


class Compiled(NamedTuple):
    launch: KernelLaunch
    grid: tuple[int, int, int]
    n_warps: int
    shared: int
    code: sass.Code

    @property
    def n_programs(self) -> int:
        return math.prod(self.grid)

    def resident(self, device: Device) -> int:
        return device.resident(self.code.registers, self.n_warps, self.shared)

    def waves(self, device: Device) -> float:
        return self.n_programs / (device.n_multiprocessors * self.resident(device))


# -- a driver without a device ---------------------------------------------------------------------------------------


class Driver:
    """Triton driver without a device: it records launches instead of launching."""

    def __init__(self, arch: int) -> None:
        self.utils = self
        self.launched: list[tuple[tuple[int, int, int], Any, Any]] = []
        self.launcher_cls = lambda source, metadata: (
            lambda x, y, z, *others: self.launched.append(((x, y, z), source, metadata))
        )

        self.get_current_target = lambda: GPUTarget("cuda", arch, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.get_active_torch_device = lambda: torch.device("cpu")
        self.get_device_properties = lambda device: {"max_shared_mem": DEVICES[arch].program_shared_bytes}
        # Triton expects: module, function, registers, spills, largest number of threads.
        self.load_binary = lambda name, kernel, shared, device: (1, 1, 0, 0, 1024)
        self.unload_module = lambda module: None


def compilations(arch: int, launches: Iterator[KernelLaunch]) -> Iterator[Compiled | str]:
    """Yield compiled code for `launches`, and a complaint for each missing or unexpected compilation.

    A `refused` launch that does not compile, as it must, yields an empty string.
    """
    device = Driver(arch)
    driver.set_active(device)
    for kernel in KERNELS.values():
        kernel.device_caches.clear()  # the caches hold code of the previous architecture
    seen = set()
    for launch in launches:
        known = KERNELS[launch.kernel].device_caches[0][0]
        n_before = len(known)
        try:
            launch.run()
        except triton.CompilationError:
            yield "" if launch.refused else f"{launch.kernel} {launch.detail} does not compile"
            continue
        if launch.refused:
            yield f"{launch.kernel} {launch.detail} compiles, and is refused at launch"
        elif (len(known) > n_before) != ((launch.kernel, launch.specialisation, launch.fixed) not in seen):
            verb = "compiles" if len(known) > n_before else "does not compile"
            yield f"{launch.kernel} {launch.detail} {verb}, against `specialisations`: {launch.specialisation}"
        elif len(known) > n_before:
            grid, _, metadata = device.launched[-1]
            binary = next(kernel for kernel in known.values() if kernel.metadata.hash == metadata.hash)
            code = sass.read(binary.asm["cubin"])
            yield Compiled(launch, grid, metadata.num_warps, metadata.shared, code)
        seen.add((launch.kernel, launch.specialisation, launch.fixed))


# -- what a server launches ------------------------------------------------------------------------------------------


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def step_launches(B: int, N: int) -> Iterator[KernelLaunch]:
    """Yield launches of `plan_block` and `accept`. With an odd B, `prefix` starts off a 16-byte boundary."""
    tokens, prefix = empty(B, N, dtype=I64), empty(3, B, dtype=I64)[1]
    request, mask = (prefix, prefix, prefix, empty(TABLE_ROWS, CONTEXT, dtype=I32)), {"mask_token_id": MASK_TOKEN_ID}
    if N in (1, BLOCKS[-1]):  # otherwise one launch plans the drafted block too
        one = functools.partial(plan_block.plan_block_triton, *request, **mask, n_tokens=N)
        yield KernelLaunch("plan_block", f"B={B} N={N}", specialisations.plan_block(N), one)
    else:
        both = functools.partial(plan_block.plan_blocks_triton, *request, **mask, n_tokens=(N, BLOCKS[-1]))
        key = specialisations.plan_block(max(N, BLOCKS[-1]))
        yield KernelLaunch("plan_block", f"B={B} N={N} and block", key, both)
    for interval in (0, TRACK_INTERVAL):
        run = functools.partial(accept.accept_triton, tokens, tokens, prefix, interval)
        detail = f"B={B} N={N}{' tracked' * bool(interval)}"
        yield KernelLaunch("accept", detail, specialisations.accept(N), run, interval)


def copy_launches(B: int, N: int, context: int = CONTEXT) -> Iterator[KernelLaunch]:
    tokens, prefix = empty(B, N, dtype=I64), empty(3, B, dtype=I64)[1]
    text, counts = empty(TABLE_ROWS, context, dtype=I32), empty(TABLE_ROWS, copy_draft.N_CLASSES, 2, dtype=I32)
    texts = copy_draft.Texts(prefix, prefix, text, counts)
    copied = copy_draft.Copied(tokens, empty(B, dtype=I32), *empty(2, B, N - 1, dtype=I32))
    copy = functools.partial(copy_draft.copy_draft_triton, tokens, texts, empty(TABLE_ROWS * max(WIDE), dtype=I32))
    yield KernelLaunch("copy_draft", f"B={B} N={N}", specialisations.copy_draft(N), copy)
    if N > 1:
        step = tokens, copied, tokens, empty(B, dtype=I32), texts
        weigh = functools.partial(weigh_copies.weigh_copies_triton, *step, totals_K2=counts[0])
        yield KernelLaunch("weigh_copies", f"B={B} N={N}", specialisations.weigh_copies(N), weigh)


def penalise_launches(P: int, N: int, E: int) -> Iterator[KernelLaunch]:
    for dtype in (F32, BF16):
        asked = penalise.Asked(
            *(empty(P, dtype=kind) for kind in (I64, I64, F32, F32, F32, I64)), stop_PE=empty(P, E, dtype=I64)
        )
        run = functools.partial(
            penalise.penalise_triton,
            *(empty(64, N, VOCABULARY, dtype=dtype), empty(64, N, dtype=I64), empty(P, dtype=I64)),
            *(empty(8, VOCABULARY, dtype=I32), asked),
        )
        yield KernelLaunch("penalise", f"P={P} N={N} E={E} {dtype}", specialisations.penalise(), run, dtype)


def append_launches(draft: sizes.AttentionSizes, T: int, B: int | None, arch: int) -> Iterator[KernelLaunch]:
    """Yield launches for T tokens of B requests, or of prompts if B is None. K and V have the draft model's layout."""
    L, G, E = draft.n_layers, draft.n_kv_heads, draft.head_dim
    k, v = empty(L, T, 2, G, E).transpose(0, 1).unbind(2)
    where = empty(3, T, dtype=I64)
    key = append_context.KeyTransform(empty(CONTEXT, E, dtype=F32), empty(L, E), 1e-6)
    n_kept = None if B is None else empty(B, dtype=I32)
    for dtype in (BF16, append_context.FP8):
        cache, addresses = empty(1 << 20, G, E, dtype=dtype), empty(L, dtype=I64)
        caches = append_context.ContextCaches((cache,) * L, (cache,) * L, addresses, addresses)

        def run(caches: append_context.ContextCaches = caches) -> None:
            append_context.append_context_triton(k, v, where[1], where[2], caches=caches, key=key, n_kept_B=n_kept)

        specialisation = specialisations.append_context(n_kept=B is not None)
        # Triton has fp8_e4m3 from Ada (sm_89) on.
        refused = dtype == append_context.FP8 and arch < 89
        yield KernelLaunch(
            "append_context", f"L={L} G={G} T={T} B={B} {dtype}", specialisation, run, (G, E, dtype), refused
        )


def verify_launch(layers: sizes.RecurrentSizes, B: int, N: int) -> KernelLaunch:
    """Return a launch where q, k, v are views of one tensor, and a, b of another, as in SGLang's backend."""
    H, V, G, K = layers.n_value_heads, layers.value_width, layers.n_key_heads, layers.key_width
    T, X = B * N, record_width(H, V, G, K)
    q, k, v = empty(T, 2 * G * K + H * V).split([G * K, G * K, H * V], dim=-1)
    a, b = empty(T, 2 * H).split([H, H], dim=-1)
    x = gdn_verify.Inputs(
        q.view(T, G, K), k.view(T, G, K), v.view(T, H, V), a, b, empty(H, dtype=F32), empty(H, dtype=BF16)
    )
    states, record = empty(N_STATES, H, V, K, dtype=F32), empty(N_STATES, max(WIDE), X, dtype=F32)

    def run() -> None:
        gdn_verify.gdn_verify_triton(x, states, empty(B, dtype=I32), record)

    return KernelLaunch("gdn_verify", f"H={H} G={G} B={B} N={N}", specialisations.gdn_verify(B, N, H, V), run, (H, G))


def fold_launch(layers: sizes.RecurrentSizes, B: int, N: int, *, tracked: bool) -> KernelLaunch:
    L, H, G, V, K = layers.n_layers, layers.n_value_heads, layers.n_key_heads, layers.value_width, layers.key_width
    states = empty(L, N_STATES, H, V, K, dtype=F32)
    record = empty(L, N_STATES, max(WIDE), record_width(H, V, G, K), dtype=F32)[:, :, :N]
    tracks = (empty(B, dtype=I64), empty(B, dtype=I64)) if tracked else (None, None)
    kept = gdn_fold.Kept(empty(B, dtype=I32), empty(B, dtype=I32), *tracks)

    def run() -> None:
        gdn_fold.gdn_fold_triton(states, record, kept, n_key_heads=G)

    detail = f"H={H} G={G} B={B} N={N}{' tracked' * tracked}"
    return KernelLaunch("gdn_fold", detail, specialisations.gdn_fold(tracked=tracked), run, (H, G))


def second_launches(draft: Second, B: int, N: int) -> Iterator[KernelLaunch]:
    """Yield launches of a DFlash 2 draft: `block_conv` with each half of a projection, and `select_path`."""

    S, H, J, K, R = draft
    x, base, change = empty(B * N, H), empty(2, S, H), empty(B * N, 2, S, J)
    for side in (0, 1):
        run = functools.partial(block_conv.block_conv_triton, x, change[:, side], base[side], block_size=N)
        yield KernelLaunch("block_conv", f"H={H} J={J} S={S} B={B} N={N}", specialisations.block_conv(S), run, (H, J))
    inputs = empty(B, N - 1, K, dtype=I64), empty(B, N - 1, K, dtype=F32), empty(B, N - 1, R), empty(3, B, dtype=I64)[1]
    tables = {f"{name}_VR": empty(VOCABULARY, R) for name in ("predecessor", "successor")}
    select = functools.partial(select_path.select_path_triton, *inputs, **tables)
    yield KernelLaunch("select_path", f"K={K} R={R} B={B} N={N}", specialisations.select_path(K), select, R)


def launches(arch: int, names: tuple[str, ...], tp_sizes: tuple[int, ...]) -> Iterator[KernelLaunch]:
    for B in BATCHES:
        for N in WIDTHS + WIDE:
            for launch in (*step_launches(B, N), *copy_launches(B, N)):
                yield launch._replace(wide=N in WIDE)
    for P, N, E in ((1, 1, 1), (3, 16, 2), (16, 8, 16)):
        yield from penalise_launches(P, N, E)
    for second in (QWEN_27B.second, *(OTHERS if len(names) > 1 else ())):
        for B in BATCHES:
            for N in WIDTHS[1:]:
                yield from second_launches(second, B, N)
    for name in names:
        draft, layers = geometry.read_draft(models.draft_of(name)), geometry.read_target(name).recurrent
        assert layers is not None
        for tp_size in tp_sizes:
            attention = dataclasses.replace(draft.attention, n_kv_heads=draft.attention.n_kv_heads // tp_size)
            for T, B in ((1, None), (511, None), (8192, None), *((B * N, B) for B in BATCHES for N in BLOCKS)):
                yield from append_launches(attention, T, B, arch)
            heads = {name: getattr(layers, name) // tp_size for name in ("n_value_heads", "n_key_heads")}
            rank = dataclasses.replace(layers, **heads)
            for B in BATCHES:
                for N in WIDTHS[1:] + WIDE:
                    yield verify_launch(rank, B, N)._replace(wide=N in WIDE)
                    yield from (fold_launch(rank, B, N, tracked=tracked) for tracked in (False, True))


# -- the report ------------------------------------------------------------------------------------------------------


def complaints(compiled: Compiled) -> Iterator[str]:
    kernel, code = compiled.launch.kernel, compiled.code
    where = f"{kernel} {compiled.launch.detail}"
    if code.stack or code.count("LDL", "STL"):
        yield f"{where} spills: {code.stack} bytes of stack, {code.count('LDL', 'STL')} loads and stores there"
    if code.registers > REGISTERS[kernel] and not compiled.launch.wide:
        yield f"{where} takes {code.registers} registers > {REGISTERS[kernel]}"


def row(compiled: Compiled, arch: int) -> dict[str, Any]:
    code, device = compiled.code, DEVICES[arch]
    return {
        "arch": arch, "kernel": compiled.launch.kernel, "launch": compiled.launch.detail, "wide": compiled.launch.wide,
        "specialisation": str(compiled.launch.specialisation), "grid": compiled.grid, "warps": compiled.n_warps,
        "registers": code.registers, "stack": code.stack, "shared": compiled.shared,
        "resident": compiled.resident(device), "waves": round(compiled.waves(device), 2),
        "instructions": len(code.instructions), "loops": [loop.last - loop.first + 1 for loop in code.loops],
        "tensor": code.count("HMMA", "HGMMA", "UTCHMMA"),
    }  # fmt: skip


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = ("warps", "registers", "stack", "shared", "resident", "waves", "instructions", "tensor")
    print(f"{'kernel':<15}{'launch':<42}{'grid':>15}{''.join(f'{name:>13}' for name in columns)}  loops")
    for one in rows:
        cells = "".join(f"{one[name]:>13}" for name in columns)
        grid = "x".join(map(str, one["grid"]))
        print(f"{one['kernel']:<15}{one['launch']:<42}{grid:>15}{cells}  {one['loops']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", type=int, nargs="+", default=list(DEVICES), choices=list(DEVICES))
    parser.add_argument("--short", action="store_true", help="one model, on one rank")
    args = parser.parse_args()
    rows, wrong = [], []
    for arch in args.archs:
        done = list(
            compilations(arch, launches(arch, MODELS[:1] if args.short else MODELS, (1,) if args.short else (1, 2)))
        )
        compiled = [one for one in done if isinstance(one, Compiled)]
        wrong += [f"sm_{arch}: {one}" for one in done if isinstance(one, str) and one]
        wrong += [f"sm_{arch}: {text}" for one in compiled for text in complaints(one)]
        print(f"sm_{arch}: {len(compiled)} specialisations")
        print_table(rows_of_arch := [row(one, arch) for one in compiled])
        rows += rows_of_arch
    document = {"torch": torch.__version__, "triton": triton.__version__, "specialisations": rows, "complaints": wrong}
    print(json.dumps(document))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
