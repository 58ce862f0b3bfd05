"""Engines: parts of the target that exist once per width: attention backend, `State`, graphs and LoRA routing.

SGLang's backends and graph runners read the number of tokens per request from SGLang's configuration when they are
created. So they are created for each width, with this width in the configuration. All widths share weights and memory
pools. They also share the scratch memory of attention kernels and the index buffers of graphs (`index_buffers.py`),
because forwards run one after another.

If width 1 decodes (`State.decodes`), its graphs are captured as SGLang captures them without speculation, but they also
return the features.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from sglang.srt.environ import envs
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import nn

from sglang_dflash.engine.stages.index_buffers import share_buffers
from sglang_dflash.engine.stages.lora import keep_buffers, routing_of
from sglang_dflash.engine.stages.ranks import free_gib, from_first_rank
from sglang_dflash.engine.stages.state import State
from sglang_dflash.engine.stages.verifier import WidthEngine

logger = logging.getLogger(__name__)

FEW_ROWS = 128  # token rows up to which a batch is padded freely, because further rows take hardly any time
PADDED = 1.25  # bound of the padded rows above FEW_ROWS, as a multiple of a batch's own rows
KEPT_FREE = 0.5  # fraction of the initially free memory that stays free when the graphs of all widths are captured


def build_engines(
    worker: TpModelWorker,
    state: State,
    state_for: Callable[[int], State],
    widths: Sequence[int],
    *,
    widest: int,
    reserve_bytes: int,
) -> dict[int, WidthEngine]:
    """Return an engine for each width whose graphs fit into memory. The engine of `widest` has SGLang's own parts.

    SGLang does not reserve memory for the captured graphs of other widths. The fraction `KEPT_FREE` of the free memory,
    and at least `reserve_bytes`, stays free for the activations of prompts. Widths whose graphs do not fit are left
    out, except the largest of `widths`.

    Args:
        worker: the target's worker.
        state: the `State` of `widest`, attached to SGLang's backend.
        state_for: function that makes the `State` of another width.
        widths: wanted verify widths.
        widest: width for which SGLang has built its own backend and graphs.
        reserve_bytes: least number of bytes that must stay free.
    """
    runner, tp_group = worker.model_runner, get_parallel().tp_group
    own = WidthEngine(runner.attn_backend, runner.decode_cuda_graph_runner, state, routing_of(runner))
    keep_buffers(runner)

    def build(width: int) -> WidthEngine:
        return own if width == widest else _build_engine(runner, state_for(width), width, own)

    def left_gib() -> float:
        return math.inf if own.graphs is None else free_gib(runner)

    reserve_gib = np.array([reserve_bytes / 2**30])
    from_first_rank(tp_group)(reserve_gib)
    alone = tp_group.world_size == 1
    engines = build_while_they_fit(widths, build, left_gib, float(reserve_gib[0]), may_fail=alone)
    if missing := sorted(set(widths) - set(engines)):
        gc.collect()  # frees the parts of an engine whose capture failed
        logger.warning(
            "the verify widths %s are disabled, because their CUDA graphs would leave too little of the %.2f GiB of "
            "free memory; lower --mem-fraction-static or --cuda-graph-max-bs-decode, or name fewer widths in "
            "SGLANG_DFLASH_WIDTHS",
            ", ".join(map(str, missing)),
            left_gib(),
        )
    return engines


def build_while_they_fit(
    widths: Sequence[int],
    build: Callable[[int], WidthEngine],
    free_gib: Callable[[], float],
    reserve_gib: float,
    *,
    may_fail: bool = False,
) -> dict[int, WidthEngine]:
    """Build the engine of the largest width, then those of other widths, until memory is short.

    The next width is always the one whose ratio to the nearest built width is largest. Its engine is assumed to need as
    much memory as the largest engine so far. The fraction `KEPT_FREE` of the free memory, and at least `reserve_gib`,
    stays free.

    Args:
        widths: wanted widths.
        build: builds the engine of a width.
        free_gib: returns the free memory in GiB.
        reserve_gib: least memory that must stay free, in GiB.
        may_fail: if memory runs out in `build`, leave out this width and the rest. With several ranks, memory may run
            out on one of them only, and the others would wait for it.
    """
    rest, engines, most_gib = set(widths), dict[int, WidthEngine](), 0.0
    left_gib = free_gib()
    kept_gib = max(left_gib * KEPT_FREE, reserve_gib)
    while rest:
        width = max(
            rest, key=lambda width: (min((abs(math.log(width / other)) for other in engines), default=0), width)
        )
        if engines and left_gib - most_gib < kept_gib:
            break
        attempt = Attempt(may_fail=may_fail and bool(engines))
        with attempt:
            engines[width] = build(width)
        if attempt.ran_out:
            logger.warning("width %d: memory ran out during its capture, with %.2f GiB free before it", width, left_gib)
            break
        rest.remove(width)
        before_gib, left_gib = left_gib, free_gib()
        if left_gib < math.inf:
            most_gib = max(most_gib, before_gib - left_gib)
            logger.info("width %d: %.2f GiB more for graphs, %.2f GiB are left", width, before_gib - left_gib, left_gib)
    return engines


class Attempt:
    """Context manager that sets `ran_out` if the device's memory runs out in it.

    With `may_fail` it suppresses this error. After a failed capture SGLang raises an error of its own. So `ran_out` is
    also set if the error has the memory's error in its chain of contexts (`__context__`).
    """

    def __init__(self, *, may_fail: bool) -> None:
        self.may_fail, self.ran_out = may_fail, False

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        while error is not None and not isinstance(error, torch.OutOfMemoryError):
            error = error.__context__
        self.ran_out = error is not None
        return self.ran_out and self.may_fail


def _build_engine(runner: ModelRunner, state: State, width: int, widest: WidthEngine) -> WidthEngine:
    with get_spec().override(speculative_num_draft_tokens=width):
        backend = runner._get_attention_backend(init_new_workspace=False)
        # SGLang sets these two attributes on its own backend in the same way.
        backend.prefill_attention_backend_str = runner.prefill_attention_backend_str
        backend.decode_attention_backend_str = runner.decode_attention_backend_str
        runner.kv_index_translator.bind_and_verify_backends([backend])
        state.attach(backend)
        graphs, captured = None, widest.graphs
        if captured is not None:
            share_buffers(backend, widest.backend)
            capture = capturing(fewer(captured.capture_bs, width))
            with capture, without_hooks(runner.model), decoding(runner) if state.decodes else nullcontext():
                graphs = type(captured)(runner, attn_backend=backend, speculative_num_draft_tokens=width)
    return WidthEngine(backend, graphs, state, routing_of(runner))


def fewer(sizes: Sequence[int], width: int) -> list[int]:
    """Return the batch sizes with which graphs of a narrower `width` are captured.

    These are SGLang's largest captured batch size and all that are powers of two. Batches of other sizes are padded. If
    a batch of more than `FEW_ROWS` rows would be padded to over `PADDED` times its rows, further sizes of SGLang's are
    captured.

    Args:
        sizes: batch sizes that SGLang captures, ascending.
        width: tokens per request.
    """
    kept = [0]
    for size, larger in zip(sizes, [*sizes[1:], 0], strict=True):
        least = max(kept[-1] + 1, FEW_ROWS // width + 1)  # smallest batch above the kept sizes and `FEW_ROWS` rows
        if size.bit_count() == 1 or not larger or (size >= least and larger > PADDED * least):
            kept.append(size)
    return kept[1:]


@contextmanager
def capturing(sizes: list[int]) -> Iterator[None]:
    """Set the batch sizes that graph runners capture, if they are built inside this context."""
    config = get_exec().graph.cuda_graph_config
    decode = dataclasses.replace(config.decode, bs=sizes)
    with get_exec().graph.override(cuda_graph_config=dataclasses.replace(config, decode=decode)):
        yield


@contextmanager
def decoding(runner: ModelRunner) -> Iterator[None]:
    """Let graph runners that are built inside this context capture decode steps that return all features.

    Their graphs do not copy recurrent states to track slots, because `InPlaceState.commit` does. As in all runners with
    DFLASH, SGLang captures no planning of attention, which would repeat a host's plan.
    """
    algorithm, runner.spec_algorithm = runner.spec_algorithm, SpeculativeAlgorithm.NONE
    features, mamba = get_exec().features, get_exec().mamba
    try:
        with (
            features.override(return_hidden_states_mode="full"),
            mamba.override(enable_mamba_extra_buffer=False),
            envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.override(False),
        ):
            yield
    finally:
        runner.spec_algorithm = algorithm


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Take off a model's forward hooks while graphs are captured.

    SGLang registers `--forward-hooks` after its own captures, so that hooks run in forwards without a graph only.
    """
    hooked = [(module, module._forward_hooks) for module in model.modules() if module._forward_hooks]
    for module, _ in hooked:
        module._forward_hooks = OrderedDict()
    try:
        yield
    finally:
        for module, hooks in hooked:
            module._forward_hooks = hooks
