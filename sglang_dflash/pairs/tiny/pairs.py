"""Tiny trained pairs of this package, and the flags that serve them without an accelerator.

The demo, the benchmarks and the tests share these flags and `require_worker`.
"""

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from sglang_dflash.pairs.servers import arms
from sglang_dflash.pairs.servers.server import Server

ASSETS = Path(__file__).resolve().parents[2] / "assets"


class Pair(NamedTuple):
    """A target and the draft trained for it."""

    target: Path
    draft: Path


HYBRID = Pair(ASSETS / "tiny" / "target", ASSETS / "tiny" / "draft")  # Qwen3.5-style: GatedDeltaNet + full attention
DENSE = Pair(ASSETS / "tiny_dense" / "target", ASSETS / "tiny_dense" / "draft")  # Qwen3-style: full attention only


# The same targets with DFlash 2 drafts.
HYBRID_2 = HYBRID._replace(draft=ASSETS / "tiny" / "draft2")
DENSE_2 = DENSE._replace(draft=ASSETS / "tiny_dense" / "draft2")


class Arm(StrEnum):
    """Kind of decoding that a server runs."""

    OFF = "off"  # no speculation: one token per step
    STOCK = "stock"  # SGLang's built-in DFLASH worker
    PLUGIN = "plugin"  # this plugin's worker


ARMS = (Arm.OFF, Arm.STOCK, Arm.PLUGIN)  # the default comparison


# Answers are compared exactly, which needs fp32: in bf16 a tiny model has near ties. The sizes of pools are given,
# because by default SGLang allocates gigabytes of host memory. A server sleeps when it is idle, so that it uses no CPU
# while another server is measured.
FLAGS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--dtype", "float32"),
    *("--max-running-requests", "8"),
    *("--max-total-tokens", "8192"),
    "--sleep-on-idle",
)
HYBRID_FLAGS = (
    *("--max-mamba-cache-size", "64"),
    *("--mamba-radix-cache-strategy", "extra_buffer"),
)
ENV = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "PYTHONUNBUFFERED": "1",
}


def launch_flags(pair: Pair) -> list[str]:
    """Return the launch flags that name the pair's target and draft, and select DFLASH."""
    speculation = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(pair.draft))
    return ["--model-path", str(pair.target), *speculation]


def command(arm: Arm, pair: Pair, *flags: str) -> list[str]:
    """Return the `python -m sglang.launch_server` command for `arm`, without host and port."""
    whole = [*launch_flags(pair), *flags]
    return [*arms.SERVE, *(arms.without_speculation(whole) if arm is Arm.OFF else whole)]


def environment(arm: Arm) -> dict[str, str]:
    """Return the environment that selects the worker of `arm`."""
    return {} if arm is Arm.OFF else {"SGLANG_DFLASH_WORKER": str(arm)}


def require_worker(arm: Arm, server: Server) -> None:
    """Check that the server runs the worker of `arm`, or raise ServerError."""
    arms.require_worker(server, ours=arm is Arm.PLUGIN)
