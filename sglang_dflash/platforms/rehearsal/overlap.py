"""Replacements where SGLang 0.5.23 orders streams only on CUDA, so that the overlap schedule runs as on a GPU.

Not covered:
- SGLang's code that skips `record_stream` for "cpu" tensors. It runs in mixed batches, and for the indices in relay
  buffers. The scheduler keeps these indices for two steps anyway.
- the unified memory pool, HiCache, pipeline parallelism and disaggregation
"""

from __future__ import annotations

import functools
import pkgutil
from typing import Any

import torch

from sglang_dflash.platforms.cpu import install
from sglang_dflash.platforms.rehearsal import branches, graph, host, launches, streams, watch

_SRT = "sglang.srt."


def device() -> dict[str, Any]:
    """Set emulated streams and events in `torch.cpu`, and return further replacements, by dotted name.

    Call this before `seams.as_launches` wraps the kernels.
    """
    for name, value in streams.names().items():
        setattr(torch.cpu, name, value)
    watch.install()
    graph.tape_of = branches.BranchedTape
    from triton.runtime.interpreter import GridExecutor

    GridExecutor.__call__ = watch.interpreted(GridExecutor.__call__)
    return {
        "torch.Tensor.cpu": watch.to_host,
        "torch.Tensor.pin_memory": watch.pin,
        "torch.Tensor.record_stream": graph.record_stream,
        _SRT + "utils.common.async_d2h": watch.async_d2h,
    }


@functools.cache  # called after each of two models is loaded, but a process has one scheduler
def scheduler() -> None:
    from sglang.srt.environ import envs
    from sglang.srt.managers.scheduler import Scheduler

    envs.SGLANG_ENABLE_WAR_BARRIER.set(True)  # always on with CUDA
    # On CUDA lengths are copied to the host on a separate stream into pinned memory; on other devices by `.cpu()`.
    install.put({"managers.overlap_utils._is_cuda": True}, _SRT)
    # An event inside the graph marks the end of a replay's reads of the scheduler's tables.
    event = "model_executor.runner.decode_cuda_graph_runner.make_external_event"
    install.put({event: lambda device_module: graph.EventInGraph()}, _SRT)

    # Torch forms that SGLang uses instead of CUDA kernels. They read device memory, so each is one launch.
    _launch("model_executor.forward_batch_info.compute_position_torch")
    _launch("mem_cache.allocation.write_cache_indices")
    _mark_host_buffers()

    launches.install()
    run = Scheduler.run_event_loop

    @functools.wraps(run)
    def run_event_loop(self: Scheduler) -> None:
        """Run the scheduler loop inside `watch.Watch`, which checks the order of accesses.

        Accesses before the loop are not checked, for example while weights are loaded and graphs are captured.
        """
        if self.draft_worker is not None:  # this plugin's worker, because SGLang's is refused with emulated streams
            launches.hold(self.draft_worker)
        with watch.Watch(graph.pool()):
            run(self)

    Scheduler.run_event_loop = run_event_loop


def _mark_host_buffers() -> None:
    """Mark SGLang's static host buffers at every fill. Their names identify them: device buffers are on "cpu" too."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import CudaGraphBufferRegistry as Registry

    fill = Registry.fill_from

    @functools.wraps(fill)
    def fill_from(self: Registry, *args: Any, **kwargs: Any) -> Any:
        for name, slot in self._slots.items():
            if name.endswith("_cpu") and slot.buffer is not None:
                host.mark(slot.buffer)
        return fill(self, *args, **kwargs)

    Registry.fill_from = fill_from


def _launch(target: str) -> None:
    install.put({target: graph.launch(pkgutil.resolve_name(_SRT + target))}, _SRT)
