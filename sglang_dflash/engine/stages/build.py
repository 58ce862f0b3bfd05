"""Construction of a server's stages. Pools, attention backends and SGLang's own graphs must exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang_dflash_kernels.accept import ACCEPT

from sglang_dflash.engine.memory.slots import DraftSlots
from sglang_dflash.engine.stages.choice import Choice
from sglang_dflash.engine.stages.context_kv import ContextKV
from sglang_dflash.engine.stages.copier import make_copier
from sglang_dflash.engine.stages.drafter import Drafter
from sglang_dflash.engine.stages.dry_run import reserve_bytes
from sglang_dflash.engine.stages.engines import build_engines
from sglang_dflash.engine.stages.greedy import Whole
from sglang_dflash.engine.stages.outputs import HiddenStates
from sglang_dflash.engine.stages.planner import Planner
from sglang_dflash.engine.stages.ranks import OneGroup
from sglang_dflash.engine.stages.simulated import SimulatedAccept
from sglang_dflash.engine.stages.stages import Stages
from sglang_dflash.engine.stages.state import State
from sglang_dflash.engine.stages.verifier import Verifier
from sglang_dflash.engine.width.chooser import widest
from sglang_dflash.flags import Copy, Simulated


def build_stages(
    worker: TpModelWorker,
    draft: ModelRunner,
    slots: DraftSlots,
    states: tuple[State, Callable[[int], State]],
    *,
    logits: Whole,
    ranks: OneGroup,
    hidden_states: HiddenStates,
    widths: Sequence[int],
    copy: Copy,
    n_slots: int,
    mask_token_id: int,
    slots_are_ours: bool,
    simulated: Simulated | None,
    on_host: bool,
) -> Stages:
    """Build the stages.

    Args:
        worker: the target's worker.
        draft: the draft's runner.
        slots: KV slots of the draft's context.
        states: the `State` of the widest verify, attached to SGLang's own attention backend, and a function that makes
            another width's `State`.
        logits: form of the logits that a verify returns, see `verified_logits`.
        ranks: arrangement of the ranks, see `OneGroup`.
        hidden_states: rows for requests with `return_hidden_states`.
        widths: verify widths.
        copy: use of n-gram copies.
        n_slots: slots of a drafted block.
        slots_are_ours: SGLang copies no K/V out of or into KV slots, see `DFlashConfig`.
        simulated: acceptance to simulate; None: acceptance is real.
        on_host: the target runs on the CPU, without GPU emulation.
    """
    target = worker.model_runner
    layout = draft.model.filling.layout
    most = widest(layout.n_tokens(n_slots), widths)
    planner, choice = Planner(target, n_slots, most, mask_token_id), Choice(target, logits)
    engines = build_engines(
        worker,
        *states,
        widths,
        widest=most,
        reserve_bytes=reserve_bytes(target, draft, choice, widths, hidden_states.n_waiting),
    )
    return Stages(
        planner=planner,
        drafter=Drafter(draft, slots, n_slots, layout, ranks.draft_scope(target)),
        verifier=Verifier(worker, engines, ranks, hidden_states, on_host=on_host),
        choice=choice,
        accept=SimulatedAccept(simulated) if simulated else ACCEPT.form_for(planner.req_to_token),
        context_kv=ContextKV(
            draft.model,
            draft,
            slots,
            n_requests=target.max_running_requests,
            block_size=n_slots,
            may_wait=slots_are_ours,
        ),
        copier=make_copier(copy, planner.req_to_token, target.model_config.vocab_size, most),
    )
