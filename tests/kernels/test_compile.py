"""Compilation of every kernel for absent GPUs, by `tests/tools/compile_kernels.py` in a process of its own.

Kernels must not spill registers. The compiled specialisations must be exactly those that `specialisations` lists.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_dflash_kernels import specialisations

from tests.tools import sass

ROOT = Path(__file__).parents[2]
SERVER = specialisations.Server(  # `compile_kernels --short` makes the launches of this server
    widths=(1, 2, 4, 6, 8, 12, 16, 24, 32), block_size=16, batch_sizes=(1, 2, 3, 8, 16, 64), n_value_heads=48,
    value_width=128, tracks=True,
)  # fmt: skip
SECOND = SERVER._replace(conv_taps=2, selector_top_k=16)  # with a DFlash 2 draft
ALL = SECOND._replace(copies=True)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment)


def compile_kernels(*arguments: str) -> list[dict[str, Any]]:
    run = python("-m", "tests.tools.compile_kernels", *arguments)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout.splitlines()[-1])
    assert document["complaints"] == []
    return document["specialisations"]


def test_kernels_spill_nothing_and_a_server_compiles_what_is_listed() -> None:
    compiled = compile_kernels("--archs", "90", "--short")
    seen = {
        kernel: {row["specialisation"] for row in compiled if row["kernel"] == kernel}
        for kernel in specialisations.KERNELS
    }
    untracked = specialisations.of_server(ALL._replace(tracks=False))
    listed = {kernel: keys | untracked[kernel] for kernel, keys in specialisations.of_server(ALL).items()}
    assert seen == {kernel: set(map(str, keys)) for kernel, keys in listed.items()}
    verify = [row for row in compiled if row["kernel"] == "gdn_verify"]
    assert all(row["tensor"] for row in verify)
    assert all(row["resident"] >= 2 for row in compiled if not row["wide"])
    short_blocks = [row for row in verify if not row["wide"]]
    assert {row["resident"] for row in short_blocks if row["warps"] == 2} == {6}, "8 requests are one wave"


@pytest.mark.full
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_published_models_on_every_architecture(arch: str) -> None:
    """Kernels with fp8 caches compile on sm_90 and sm_100, but not on sm_80. `compile_kernels` fails otherwise."""
    compiled = compile_kernels("--archs", arch)
    fp8 = [row for row in compiled if "float8" in row["launch"]]
    assert bool(fp8) == (arch != "80")


@pytest.mark.full
@pytest.mark.parametrize("arch", ["86", "89", "120"])
def test_workstation_gpus_run_more_than_one_program_per_multiprocessor(arch: str) -> None:
    """These GPUs have 99 KiB of shared memory per program and 48 warps. Fp8 caches compile from sm_89 on."""
    compiled = compile_kernels("--archs", arch, "--short")
    assert bool([row for row in compiled if "float8" in row["launch"]]) == (arch != "86")
    assert [row for row in compiled if row["resident"] < 2 and not row["wide"]] == []


COPIES = """
import json
from sglang_dflash_kernels import copy_draft
from tests.tools import compile_kernels, sass
CYCLES_PER_US, N, device = 1755, 16, compile_kernels.DEVICES[90]
def cycles(n_programs, way):
    return max(1, n_programs / at_once) * sass.cycles(way)
rows = []
for n_text, B in ((32768, 1), (131072, 1), (32768, 32), (131072, 32)):
    launch = next(compile_kernels.copy_launches(B, N, context=n_text + N))
    (compiled,) = compile_kernels.compilations(90, iter([launch]))
    at_once = device.n_multiprocessors * device.resident(compiled.code.registers, compiled.n_warps, compiled.shared)
    n_tiles = -(-(n_text + copy_draft.PLACES - 1) // copy_draft.TILE)
    n_searching = min(n_tiles, compiled.grid[1])
    beyond, search, *decide = sass.stages(compiled.code.executed([-(-n_tiles // n_searching)]))
    latency = cycles(B * n_searching, beyond + search) + cycles(B, sum(decide, []))
    (loop,) = compiled.code.loops
    names = [i.name for i in compiled.code.instructions[loop.first : loop.last + 1]]
    rows.append((latency / CYCLES_PER_US, sum(name in ("BRA", "BAR", "EXIT") for name in names)))
print(json.dumps(rows))
"""


def test_searches_of_long_histories_are_short() -> None:
    """Limit the predicted latency on an H200 in microseconds.

    The search loop must contain no branch, barrier or exit except the branch that repeats it.
    """
    run = python("-c", COPIES)
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    assert [n_branches for _, n_branches in rows] == [1] * 4
    assert all(us < limit for (us, _), limit in zip(rows, (10, 12, 25, 70), strict=True)), rows


@pytest.mark.ci
def test_readme_has_the_computed_waves_and_times() -> None:
    run = python("-m", "tests.tools.tables.kernel_waves")
    assert run.returncode == 0, run.stderr
    waves, times = run.stdout.rstrip().split("\n\n")
    page = (ROOT / "kernels/README.md").read_text()
    assert waves in page
    assert times in page


@pytest.mark.ci
def test_sglangs_convolution_writes_contiguous_windows() -> None:
    """A thread writes pairs of channels at once. With SGLang's strips it writes single channels, 2 bytes each."""
    run = python("-m", "tests.tools.conv_windows")
    assert run.returncode == 0, run.stderr
    stores = json.loads(run.stdout.splitlines()[-1])
    assert stores == {"plugin": {"2": 8, "4": 64}, "SGLang": {"2": 104, "4": 16}}


WRONG = """
from tests.tools import compile_kernels
from sglang_dflash_kernels import specialisations
for key in ("one", "n_tokens"):
    specialisations.accept = lambda n_tokens: n_tokens if key == "n_tokens" else key
    launches = (launch for N in (3, 4, 8) for launch in compile_kernels.step_launches(1, N))
    print([text for text in compile_kernels.compilations(90, launches) if isinstance(text, str)])
"""


def test_wrong_specialisation_list_is_reported() -> None:
    run = python("-c", WRONG)
    too_few, too_many = run.stdout.splitlines()
    assert "accept B=1 N=8 compiles, against `specialisations`: one" in too_few
    assert "accept B=1 N=4 does not compile, against `specialisations`: 4" in too_many


def test_server_without_recurrent_layers_has_fewer_specialisations() -> None:
    seen = specialisations.of_server(SERVER._replace(widths=(1, 16), n_value_heads=0))
    assert seen == {
        "plan_block": {1, 16},
        "accept": {1, 16},
        "penalise": {"any"},
        "append_context": {"accepted", "all"},
    }
    seen = specialisations.of_server(SERVER._replace(widths=(1,), block_size=8))
    assert seen == {"plan_block": {1, 8}, "accept": {1}, "penalise": {"any"}, "append_context": {"all"}}
    assert [specialisations.of_server(SERVER._replace(tracks=tracks))["gdn_fold"] for tracks in (False, True)] == [
        {"untracked"},
        {"tracked"},
    ]


def test_dflash_2_draft_adds_its_kernels() -> None:
    assert specialisations.of_server(SECOND) == specialisations.of_server(SERVER) | {
        "block_conv": {2},
        "select_path": {16},
    }


def test_n_gram_copies_add_their_kernels() -> None:
    seen = specialisations.of_server(SECOND._replace(copies=True))
    assert seen == specialisations.of_server(SECOND) | {
        "copy_draft": {1, 2, 4, 8, 16, 32},
        "weigh_copies": {2, 4, 8, 16, 32},
    }
    assert tuple(seen) == specialisations.KERNELS


def line(op: str, rest: str = "", *, stall: int = 1, sets: int = 7, waits: int = 0) -> str:
    control = (stall | sets << 5 | 7 << 8 | waits << 11) << 41
    return f"        /*0000*/   {op} {rest} ;   /* 0x{0:016x} */\n{' ' * 90}/* 0x{control:016x} */\n"


def test_machine_code_is_read_and_followed() -> None:
    text = (
        line("LDG.E.128", "R4, [R2.64]", sets=0, stall=2)
        + ".L_x_0:\n"
        + line("@P0 FFMA", "R1, R4, R4, R1", waits=1, stall=4)
        + line("@P1 BRA", "`(.L_x_0)", stall=5)
        + line("EXIT", stall=5)
        + ".L_x_1:\n"
        + line("BRA", "`(.L_x_1)")
    )
    instructions, labels = sass.instructions_and_labels(text)
    code = sass.Code(instructions, sass.innermost(instructions, labels), registers=8, stack=0)
    assert [i.op for i in code.instructions] == ["LDG.E.128", "FFMA", "BRA", "EXIT", "BRA"]
    assert code.count("FFMA", "LDG") == 2
    assert code.loops == [sass.Loop(1, 2)]
    way = code.executed([3])
    assert [i.name for i in way] == ["LDG", *["FFMA", "BRA"] * 3, "EXIT", "BRA"]
    assert sass.cycles(way) == sass.CYCLES["LDG"] + 3 * (4 + 5) + 5 + 1
    assert [len(stage) for stage in sass.stages(way)] == [8, 1]
