"""Machine that runs the checks, and the flags that serve a pair on it."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from sglang_dflash import flags
from sglang_dflash.engine.host.backends import BACKENDS
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Pair

# Program that prints the GPU's properties. It is a separate process, because it occupies half a GiB of GPU memory.
ASK = """import json, torch
gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps(gpu and [gpu.name, f"sm{gpu.major}{gpu.minor}", gpu.total_memory]))"""
MAX_REQUESTS = "32"  # for a tiny pair's server on a GPU
GPU_FLAGS = (
    # Servers start side by side. Each counts the others' memory as used, so it may take half of what is free at its
    # start.
    *("--mem-fraction-static", "0.5", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "131072"),  # the default for a tiny model is millions, with minutes of bookkeeping
    *("--max-running-requests", MAX_REQUESTS, "--cuda-graph-max-bs-decode", MAX_REQUESTS),
    *("--mamba-radix-cache-strategy", "extra_buffer", "--max-mamba-cache-size", "256"),
)
# Attention backends by architecture: SGLang's default first, then others that run on the GPU.
ATTENTION = {
    "sm80": ("flashinfer", "triton"),
    "sm89": ("flashinfer", "triton"),
    "sm90": ("fa3", "flashinfer", "triton"),
    "sm100": ("trtllm_mha", "fa4", "flashinfer", "triton"),
    "sm120": ("flashinfer", "triton"),
}
ALIASES = {"sm86": "sm80", "sm87": "sm80", "sm103": "sm100", "sm121": "sm120"}
PAGE_SIZES = (1, 16)
# SGLang captures no batch sizes on a CPU by default. Emulating prefill graphs takes a minute, so they are disabled.
EMULATION_FLAGS = ("--cuda-graph-bs-decode", "1", "2", "4", "8", "--cuda-graph-backend-prefill", "disabled")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


class Gpu(NamedTuple):
    """First GPU of the machine."""

    name: str
    device: str  # "sm90"
    memory: int  # bytes


@dataclass(frozen=True)
class Place:
    """Machine of a run, and the pair served on it."""

    gpu: Gpu | None  # None: a GPU is emulated
    device: str  # architecture of the real or emulated GPU, such as "sm90"
    pair: Pair
    is_own: bool  # the pair is the user's, not the tiny pair
    server_flags: tuple[str, ...]  # appended to the flags of every server
    short: bool
    folder: Path  # for logs
    port: int  # first port to try
    is_assumed: bool = False  # there is no GPU, real or emulated, and the checks are only listed

    @property
    def level(self) -> str:
        return "R" if self.gpu is None else "G"

    @property
    def where(self) -> str:
        return f"{self.device} rehearsed on a CPU" if self.gpu is None else self.gpu.name

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the attention backends of this device, the preferred one first."""
        return ATTENTION.get(self.device, ("triton",))

    def page_sizes(self, attention: str) -> list[int]:
        """Return the sizes in `PAGE_SIZES` that the backend supports."""
        pages = BACKENDS[attention].pages
        return [size for size in PAGE_SIZES if not pages or size in pages]

    @property
    def side_by_side(self) -> bool:
        """Return whether several servers may run at the same time.

        The tiny pair's servers need little memory. By default a server of the user's pair takes most of it.
        """
        return not self.is_own

    @property
    def exact(self) -> bool:
        """Return whether servers compute in fp32.

        The user's own pair keeps its dtype. On a GPU SGLang's kernels for hybrid targets take no fp32.
        """
        return self.gpu is None and not self.is_own

    @property
    def env_of_checks(self) -> dict[str, str]:
        """Return environment variables to set in processes that run checks. Triton reads TRITON_INTERPRET at import."""
        return OFFLINE if self.gpu else OFFLINE | {"TRITON_INTERPRET": "1"}

    def flags(self, attention: str, page_size: int | None = None) -> list[str]:
        """Return the flags of a server, without models, speculation, host and port."""
        page_size = page_size or self.page_sizes(attention)[0]
        own = ["--attention-backend", attention, "--page-size", str(page_size), *self.server_flags]
        if self.is_own:
            return own if self.gpu else ["--device", "cpu", *own]
        if self.gpu is None:
            return [*tiny.FLAGS, *tiny.HYBRID_FLAGS, *EMULATION_FLAGS, *own]
        return [*GPU_FLAGS, "--dtype", "bfloat16", *own]

    @property
    def env(self) -> dict[str, str]:
        """Return the environment variables to add for a server."""
        return tiny.ENV | OFFLINE if self.gpu is None else OFFLINE


def place_of(options: argparse.Namespace) -> Place:
    """Return the machine and the pair for a command line, without using the GPU in this process.

    Raises:
        ValueError: no GPU is found or emulated, one model of a pair is missing, or an environment variable is invalid.
    """
    emulated = flags.read(os.environ).rehearse.gpu
    gpu = None if emulated else find_gpu()
    has_none = gpu is None and not emulated
    if has_none and not options.list:
        raise ValueError(
            "torch finds no CUDA device; check nvidia-smi, CUDA_VISIBLE_DEVICES and the build of torch, or set "
            "SGLANG_DFLASH_REHEARSE=sm90 to emulate one on this CPU"
        )
    if bool(options.model_path) != bool(options.draft_path):
        raise ValueError("found one of --model-path and --draft-path; give both")
    if not options.list:
        require_here("--model-path", options.model_path)
        require_here("--draft-path", options.draft_path)
    return Place(
        gpu=gpu,
        device=ALIASES.get(gpu.device, gpu.device) if gpu else emulated or "sm90",
        pair=Pair(options.model_path, options.draft_path) if options.model_path else tiny.HYBRID,
        is_own=bool(options.model_path),
        server_flags=tuple(options.flags or ()),
        short=options.short,
        folder=options.folder,
        port=options.port,
        is_assumed=has_none,
    )


def require_here(name: str, path: str | None) -> None:
    """Check that the value of an option is a folder, or a hub name in the local cache, or raise ValueError."""
    if path is None or Path(path).is_dir():
        return
    try:
        is_cached = isinstance(try_to_load_from_cache(path, "config.json"), str)
    except HFValidationError:
        raise ValueError(f"{name} {path} is no folder and no name on the hub; give one of them") from None
    if not is_cached:
        cure = f"give a folder, or run `hf download {path}` first"
        raise ValueError(f"{name} {path} is not on this machine, and prove runs offline; {cure}")


def find_gpu() -> Gpu | None:
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    lines = asked.stdout.strip().splitlines()
    found = json.loads(lines[-1]) if asked.returncode == 0 and lines else None
    return Gpu(*found) if found else None
