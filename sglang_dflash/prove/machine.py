"""Where the checks run, and with which flags a pair is served there.

A `Place` is made of the command line in every process anew; making it starts nothing on the GPU of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sglang_dflash import flags
from sglang_dflash.host.backends import BACKENDS
from sglang_dflash.tiny import pairs as tiny
from sglang_dflash.tiny.pairs import Pair

# In a process of its own: naming the device takes half a GiB of its memory for as long as the process lives.
ASK = """
import json, torch
if torch.cuda.is_available():
    properties, capability = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability(0)
    print(json.dumps([properties.name, "sm%d%d" % capability, properties.total_memory]))
else:
    print("null")
"""
MAX_REQUESTS = 32  # of a tiny pair's server on a GPU
GPU_FLAGS = (
    *("--mem-fraction-static", "0.3"),
    *("--max-total-tokens", "131072"),  # of a tiny model a card holds millions, whose bookkeeping takes minutes
    *("--max-running-requests", str(MAX_REQUESTS)),
    *("--cuda-graph-max-bs-decode", str(MAX_REQUESTS)),
    *("--sampling-backend", "pytorch"),
)
HYBRID_GPU_FLAGS = ("--mamba-radix-cache-strategy", "extra_buffer", "--max-mamba-cache-size", "256")
# Of the target and the draft alike: what SGLang itself would choose first, then those that a GPU also has.
ATTENTION = {
    "sm80": ("flashinfer", "triton"),
    "sm89": ("flashinfer", "triton"),
    "sm90": ("fa3", "flashinfer", "triton"),
    "sm100": ("trtllm_mha", "fa4", "flashinfer", "triton"),
    "sm120": ("flashinfer", "triton"),
}
PAGE_SIZES = (1, 16)
FP32_ATTENTION = ("triton",)  # of a GPU's; a rehearsed one computes in fp32 whatever its name
# Host devices capture no sizes of their own accord; prompts' graphs take a minute to rehearse and prove nothing here.
REHEARSAL_FLAGS = ("--cuda-graph-bs-decode", "1", "2", "4", "8", "--cuda-graph-backend-prefill", "disabled")
HYBRID, DENSE, OWN = "hybrid", "dense", "own"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
ALIASES = {"sm86": "sm80", "sm87": "sm80", "sm103": "sm100", "sm121": "sm120"}


class Gpu(NamedTuple):
    name: str
    device: str  # "sm90"
    memory: int  # bytes


@dataclass(frozen=True)
class Place:
    """
    Attributes:
        gpu: None: one is rehearsed.
        device: "sm90", the GPU's or the rehearsed one's.
        pairs: those that are served, by name; a pair of one's own is alone.
        server_flags: go to every server, last.
        short: the short form.
        folder: for logs.
        port: where free ports are looked for from.
    """

    gpu: Gpu | None
    device: str
    pairs: Mapping[str, Pair]
    server_flags: tuple[str, ...]
    short: bool
    folder: Path
    port: int

    @property
    def level(self) -> str:
        return "R" if self.gpu is None else "G"

    @property
    def where(self) -> str:
        return f"{self.device} rehearsed on a CPU" if self.gpu is None else self.gpu.name

    @property
    def backends(self) -> tuple[str, ...]:
        """Attention backends of this device, the preferred one first."""
        return ATTENTION.get(self.device, ("triton",))

    def page_sizes(self, attention: str) -> list[int]:
        """The tried page sizes that the backend takes."""
        pages = BACKENDS[attention].pages
        return [size for size in PAGE_SIZES if not pages or size in pages]

    @property
    def side_by_side(self) -> bool:
        """Whether servers start beside one another. On a GPU each takes what it finds free for its own."""
        return self.gpu is None and OWN not in self.pairs

    @property
    def main_pair(self) -> str:
        """The one with recurrent layers, where there is a choice."""
        return next(iter(self.pairs))

    def exact(self, attention: str) -> bool:
        """Whether answers and steps are computed in fp32 there, so that they can be compared exactly."""
        return OWN not in self.pairs and (self.gpu is None or attention in FP32_ATTENTION)

    @property
    def child_env(self) -> dict[str, str]:
        """Of a process that checks. Triton reads whether it interprets when it is imported."""
        return {"PYTHONUNBUFFERED": "1"} | OFFLINE | ({} if self.gpu else {"TRITON_INTERPRET": "1"})

    def flags(self, pair: str, attention: str, page_size: int | None = None) -> list[str]:
        """Of a server of `pair`, without models, speculation, host and port."""
        page_size = page_size or self.page_sizes(attention)[0]
        own = ["--attention-backend", attention, "--page-size", str(page_size)]
        if pair == OWN:
            return [*own, *self.server_flags]
        recurrent = pair == HYBRID
        if self.gpu is None:
            return [*tiny.FLAGS, *(tiny.HYBRID_FLAGS if recurrent else ()), *REHEARSAL_FLAGS, *own, *self.server_flags]
        dtype = "float32" if self.exact(attention) else "bfloat16"
        more = HYBRID_GPU_FLAGS if recurrent else ()
        return [*GPU_FLAGS, *more, "--dtype", dtype, *own, *self.server_flags]

    def env(self, attention: str) -> dict[str, str]:
        if self.gpu is None:
            return dict(tiny.ENV) | OFFLINE
        conv = {"SGLANG_MAMBA_CONV_DTYPE": "float32"} if self.exact(attention) else {}
        return {"PYTHONUNBUFFERED": "1"} | OFFLINE | conv


def place_of(options: argparse.Namespace) -> Place:
    """
    Raises:
        ValueError: there is neither a GPU nor the rehearsal of one; half a pair.
    """
    rehearse = flags.read(os.environ).rehearse
    gpu = None if rehearse.gpu else find_gpu()
    if gpu is None and not rehearse.gpu:
        raise ValueError("no CUDA device here; SGLANG_DFLASH_REHEARSE=sm90 rehearses one on this CPU")
    if bool(options.model_path) != bool(options.draft_path):
        raise ValueError("a pair of your own needs both --model-path and --draft-path")
    pairs = {HYBRID: tiny.HYBRID, DENSE: tiny.DENSE}
    if options.model_path:
        pairs = {OWN: Pair(options.model_path, options.draft_path)}
    return Place(
        gpu=gpu,
        device=ALIASES.get(gpu.device, gpu.device) if gpu else rehearse.gpu,
        pairs=pairs,
        server_flags=tuple(options.flags or ()),
        short=options.short,
        folder=options.folder,
        port=options.port,
    )


def find_gpu() -> Gpu | None:
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    lines = asked.stdout.strip().splitlines()
    found = json.loads(lines[-1]) if asked.returncode == 0 and lines else None
    return Gpu(*found) if found else None
