"""Machine code (SASS) of a kernel: its instructions, its loops, and the cycles that one warp takes.

`nvdisasm` prints every instruction with its 128 bits. The upper bits hold the assembler's schedule: cycles until the
next instruction may issue, which of six scoreboards the instruction sets, and which it waits for. From the schedule
`cycles` computes the latency of one warp without a GPU. Latencies in `CYCLES` are estimates.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
NOTHING = 7  # scoreboard field: none
# Latency in cycles, issue to result, of instructions that set a scoreboard. Estimates for Hopper, within 20 % of
# microbenchmarks.
CYCLES = {
    **{"LDG": 800, "LDGSTS": 800, "ATOMG": 800, "MEMBAR": 800},
    **{"LDS": 30, "LDSM": 33, "SHFL": 24, "MUFU": 22, "BAR": 30, "HMMA": 33},
}
OTHERS_CYCLES = 25  # for instructions not in CYCLES that set a scoreboard
READ_CYCLES = 12  # from issue until an instruction has read its operands

INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<op>[A-Z][A-Z0-9_.]*)(?P<rest>.*?);"  # address, predicate, op
    r".*\n\s*/\* 0x(?P<control>\w{16}) \*/"
)
LABEL = re.compile(r"^(\.L_\w+):", re.M)


class Instruction(NamedTuple):
    op: str  # with suffixes, as in LDG.E.128
    rest: str
    stall: int  # cycles until the next may issue
    sets: int  # scoreboard released when the result is there
    reads: int  # scoreboard released when the operands have been read
    waits: int  # bit mask of scoreboards that the instruction waits for

    @property
    def name(self) -> str:
        return self.op.split(".")[0]


class Loop(NamedTuple):
    """Innermost loop: indices of its first instruction and of its backward branch."""

    first: int
    last: int


class Code(NamedTuple):
    instructions: list[Instruction]
    loops: list[Loop]  # in the order of the code
    registers: int  # per thread
    stack: int  # bytes per thread; above 0 if registers are spilled

    def count(self, *names: str) -> int:
        """Count instructions with one of `names`, which have no suffixes."""
        return sum(i.name in names for i in self.instructions)

    def executed(self, trips: Sequence[int]) -> list[Instruction]:
        """Return one warp's instructions if loop i runs `trips[i]` times and no forward branch is taken.

        Raises:
            ValueError: `trips` does not have one number for each innermost loop.
        """
        path, at = [], 0
        for (first, last), n in zip(self.loops, trips, strict=True):
            path += self.instructions[at:first] + self.instructions[first : last + 1] * n
            at = last + 1
        return path + self.instructions[at:]


def stages(path: Sequence[Instruction]) -> list[list[Instruction]]:
    """Split executed instructions after each EXIT. If an EXIT has a predicate, only some programs exit there."""
    cuts = [0, *(at + 1 for at, i in enumerate(path) if i.name == "EXIT"), len(path)]
    return [list(path[first:last]) for first, last in pairwise(cuts)]


def read(cubin: bytes) -> Code:
    """Disassemble a compiled kernel with `nvdisasm` and `cuobjdump`, which Triton includes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = output("nvdisasm", "-c", "-hex", file.name)
        usage = output("cuobjdump", "-res-usage", file.name)
    instructions, labels = instructions_and_labels(text)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return Code(instructions, innermost(instructions, labels), registers, stack)


def output(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def instructions_and_labels(text: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels = {}
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.match(line + "\n" + following):
            bits = int(found["control"], 16) >> 41
            fields = (bits & 15, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63)
            instructions.append(Instruction(found["op"], found["rest"], *fields))
    return instructions, labels


def innermost(instructions: list[Instruction], labels: dict[str, int]) -> list[Loop]:
    loops = []
    for at, instruction in enumerate(instructions):
        target = re.search(r"`\((\.L_\w+)\)", instruction.rest)
        # A kernel ends with a branch to itself, which is no loop.
        if instruction.name == "BRA" and target and labels[target[1]] < at:
            loops.append(Loop(labels[target[1]], at))
    return [a for a in loops if not any(b != a and a.first <= b.first and b.last <= a.last for b in loops)]


def cycles(path: Sequence[Instruction]) -> int:
    """Return the cycles of one warp that runs alone, from its first instruction to its last."""
    now = 0
    ready = [0] * NOTHING
    groups: list[int] = []  # cycle at which each group of asynchronous copies to shared memory is complete
    arrives = 0  # cycle at which the last asynchronous copy is complete
    for i in path:
        now = max([now, *(at for board, at in enumerate(ready) if i.waits >> board & 1)])
        latency = CYCLES.get(i.name, OTHERS_CYCLES)
        if i.name == "LDGSTS":
            arrives = now + latency
        elif i.name == "LDGDEPBAR":
            groups.append(arrives)
        elif i.name == "DEPBAR":
            n_pending = int(re.search(r"SB0, (0x[0-9a-f]+)", i.rest)[1], 16)
            now = max([now, *groups[: len(groups) - n_pending]])
        elif i.name in ("BAR", "MEMBAR"):
            now += latency
        if i.sets != NOTHING:
            ready[i.sets] = now + (0 if i.name in ("LDGSTS", "LDGDEPBAR") else latency)
        if i.reads != NOTHING:
            ready[i.reads] = max(ready[i.reads], now + READ_CYCLES)
        now += max(i.stall, 1)
    return now
