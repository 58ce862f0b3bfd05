"""Hooks of a scheduler process with DFLASH. `plugin.create_worker` sets them before the worker is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_dflash.engine import saver
from sglang_dflash.engine.config import DFlashConfig
from sglang_dflash.engine.draft import weight_push
from sglang_dflash.engine.draft.weight_update import own_checkpoint_only
from sglang_dflash.engine.host import contract as host
from sglang_dflash.engine.host.draft_input import after_transfer, row_headroom
from sglang_dflash.engine.host.intake import take_in, take_no_embedding
from sglang_dflash.engine.host.names import HOOKS, SECTIONS
from sglang_dflash.engine.host.requests import (
    admit,
    match_anew,
    outcomes_before_version,
    outcomes_first,
    update_finish_state,
)
from sglang_dflash.engine.host.sessions import (
    create_req,
    end_aborted_turns,
    end_turn,
    free_refused,
    keep_no_memory,
    keep_read_tokens,
)
from sglang_dflash.engine.host.target_models import complete
from sglang_dflash.engine.memory.records import count_records
from sglang_dflash.engine.memory.texts import beside_texts
from sglang_dflash.engine.stages.mixing import cache_no_state_ahead, mix_plain
from sglang_dflash.engine.stages.outputs import experts_of_blocks
from sglang_dflash.flags import Copy


def hook_scheduler(config: DFlashConfig) -> None:
    """Set and apply the hooks that only a scheduler with DFLASH needs. The hooked modules are imported already."""
    hooks: host.Hooks = {
        HOOKS["generate"]: (take_in, HookType.AROUND),
        HOOKS["embed"]: (take_no_embedding, HookType.AROUND),
        HOOKS["validate_request"]: (admit, HookType.AROUND),
        HOOKS["row_headroom"]: (row_headroom, HookType.AFTER),
        HOOKS["after_transfer"]: (after_transfer, HookType.AFTER),
        HOOKS["finish"]: (update_finish_state, HookType.AROUND),
        HOOKS["session"]: (create_req, HookType.AROUND),
        HOOKS["internal_state"]: (add_dflash, HookType.AFTER),
        HOOKS["start_metrics"]: (start_metrics, HookType.AFTER),
        HOOKS["count_states"]: (count_records, HookType.AROUND),
        HOOKS["new_version"]: (outcomes_before_version, HookType.AROUND),
        HOOKS["resume"]: (saver.clear_padding, HookType.AFTER),
        HOOKS["experts"]: (experts_of_blocks(config.widest), HookType.AROUND),
        HOOKS["next_prompts"]: (mix_plain, HookType.AROUND),
    }
    if config.flags.simulated is None:  # with simulated acceptance SGLang rejects sampling masks
        hooks[HOOKS["validate_mask"]] = admit, HookType.AROUND
    recurrent = config.target.recurrent
    hooks[HOOKS["turn_end"]] = end_turn if recurrent else keep_read_tokens, HookType.AROUND
    if recurrent:
        hooks |= recurrent_hooks()
    if recurrent and config.disaggregation == "decode":
        hooks[HOOKS["update_running"]] = outcomes_first, HookType.AROUND
    of_draft_kv = {HOOKS[name]: hook for name, hook in config.draft_kv.hooks(recurrent=recurrent).items()}
    host.set_hooks(hooks | weight_hooks(config) | of_draft_kv)
    if config.copy is not Copy.OFF:
        host.set_hooks({HOOKS["kv_bytes"]: (beside_texts, HookType.AROUND)})
    complete(config.target.architecture)


def recurrent_hooks() -> host.Hooks:
    """Return the additional hooks for targets with recurrent layers, by the names that they hook."""
    return {
        HOOKS["session_memory"]: (keep_no_memory, HookType.AROUND),
        HOOKS["add_request"]: (free_refused, HookType.AROUND),
        HOOKS["match"]: (match_anew, HookType.AROUND),
        HOOKS["retract"]: (end_aborted_turns, HookType.AFTER),
        HOOKS["prefill_result"]: (cache_no_state_ahead, HookType.AROUND),
    }


def weight_hooks(config: DFlashConfig) -> host.Hooks:
    """Return the hooks on new weights for target and draft, by the names that they hook."""
    is_quantized = config.draft_quantization is not None
    sizes = {"vocab_size": config.target.vocab_size, "block_size": config.block_size}
    hooks: dict[str, Callable[..., Any]] = {
        "update_from_disk": own_checkpoint_only(config.draft, **sizes, served_is_quantized=is_quantized),
        "push_tensors": weight_push.to_target_unless_named,
        "push_over_group": weight_push.to_target_unless_named,
        "load_pushed": weight_push.refuse_unknown,
        "load_from_ipc": weight_push.draft_stays,
    }
    if is_quantized:
        hooks["begin_push"] = weight_push.quantized_draft_stays
    return {HOOKS[name]: (hook, HookType.AROUND) for name, hook in hooks.items()}


def add_dflash(result: Any, controller: Any, *_: object) -> Any:
    """Add the DFLASH worker's report to the result.

    Hook after `SchedulerInternalStateController.get_internal_state`.
    """
    result.internal_state["dflash"] = controller.scheduler.draft_worker.describe()
    return result


def start_metrics(result: None, reporter: Any) -> None:
    """Start DFLASH metrics if the scheduler reports metrics. Hook after `SchedulerMetricsReporter.__post_init__`."""
    if not reporter.current_scheduler_metrics_enabled:
        return
    host.check(SECTIONS["metrics"])
    from sglang_dflash.engine.metrics.meter import Meter

    meter = Meter.of(reporter)
    host.set_hooks({HOOKS["outcome"]: (meter.add, HookType.AFTER), HOOKS["idle"]: (meter.idle, HookType.AFTER)})
