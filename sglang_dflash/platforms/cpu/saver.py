"""Stand-in for the package `torch_memory_saver`, whose libraries need CUDA.

SGLang's own adapter calls the package for `--enable-memory-saver`. Without CUDA, processes with the original fail to
start.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any


class KeepingSaver:
    """Memory saver of a CPU: `/release_memory_occupation` gives no memory back, so all values are kept."""

    enabled = True

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def cuda_graph(self, *, tag: str, enable_cpu_backup: bool = False, **options: Any) -> AbstractContextManager[None]:
        """Raise an error, because a CPU has no graphs."""
        raise NotImplementedError

    def disable(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pause(self, tag: str) -> None:
        """Do nothing."""

    def resume(self, tag: str) -> None:
        """Do nothing."""


def install(saver: KeepingSaver) -> None:
    """Install `saver` as `torch_memory_saver`, before SGLang imports the package."""
    package = ModuleType("torch_memory_saver")
    vars(package).update(torch_memory_saver=saver, configure_subprocess=nullcontext)
    sys.modules["torch_memory_saver"] = package
