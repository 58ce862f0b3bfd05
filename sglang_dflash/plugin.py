"""SGLang's entry point into the plugin, and the hooks it sets.

SGLang logs and ignores an error in a plugin, so nothing is decided in `register`: the checks run inside the hooks,
where raising stops the launch. `register` itself ends the process when a name it hooks is gone, because then no hook
could do that. What DFLASH means and who may serve it is checked twice: when the launching process resolves its
arguments, seconds after the start, and in each scheduler process, before its worker is made.
"""

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dflash import cli, flags, host
from sglang_dflash.errors import HostMismatch
from sglang_dflash.flags import Worker
from sglang_dflash.host_names_metrics import METRICS

if TYPE_CHECKING:
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_dflash.arguments import Target
    from sglang_dflash.config import DFlashConfig

    Hooks = dict[str, tuple[Callable[..., Any], HookType]]

logger = logging.getLogger(__name__)

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
VALIDATE_REQUEST = "sglang.srt.speculative.dflash_utils.validate_dflash_request"
FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
LONGEST_HIT = "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len"
SESSION = "sglang.srt.session.session_controller.Session.create_req"
UPDATE_FROM_DISK = (
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk"
)
INTERNAL_STATE = (
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state"
)
COUNT_STATES = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache"
KV_BYTES = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"
KV_BYTES_PER_TOKEN = "sglang.srt.speculative.dflash_utils.scale_kv_cell_size_per_token_for_dflash"
REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
START_METRICS = f"{REPORTER}.__post_init__"
IDLE = f"{REPORTER}._maybe_log_idle_metrics"
OUTCOME = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
    "_resolve_spec_v2_tokens"
)
ROW_HEADROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"


def register() -> None:
    """Called by SGLang once in every process, before arguments are parsed or a worker is made."""
    try:
        host.require_seams()
    except HostMismatch as mismatch:
        if os.environ.get("SGLANG_DFLASH_WORKER") == Worker.STOCK:
            logger.warning("%s; it stays out of the way (SGLANG_DFLASH_WORKER=stock)", mismatch)
            return
        # Not an error that SGLang would log and ignore: it ends the process.
        sys.exit(f"{mismatch}; install that one, or set SGLANG_DFLASH_WORKER=stock")
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dflash.cpu import register_choices

    HookRegistry.register(CREATE_WORKER, create_worker, HookType.AROUND)
    HookRegistry.register(ADD_CLI_ARGS, add_old_flags, HookType.AFTER)
    register_resolution_hook("handle_deprecated_dp_attention")(apply_flags)
    register_resolution_hook("handle_speculative_decoding")(check_arguments)
    register_choices()


def create_worker(stock: Callable[..., type], algorithm: Any, server_args: Any) -> type:
    """AROUND `SpeculativeAlgorithm.create_worker`: our worker for DFLASH, SGLang's for everything else."""
    if not algorithm.is_dflash() or flags.read(os.environ).worker is Worker.STOCK:
        return stock(algorithm, server_args)
    host.require()
    from sglang.srt.models.registry import ModelRegistry

    from sglang_dflash.arguments import target_of
    from sglang_dflash.config import DFlashConfig
    from sglang_dflash.draft_model import DFlashDraftModel
    from sglang_dflash.worker import DFlashWorker

    config = DFlashConfig.from_server_args(server_args)
    ModelRegistry.models["DFlashDraftModel"] = DFlashDraftModel
    hook_scheduler(config, target_of(server_args))
    if flags.read(os.environ).probe:
        from sglang_dflash.prove.probe import ProbedWorker

        return ProbedWorker
    return DFlashWorker


def hook_scheduler(config: "DFlashConfig", target: "Target") -> None:
    """What only a scheduler that serves DFLASH needs; it has these modules loaded anyway."""
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_dflash.draft_input import row_headroom
    from sglang_dflash.draft_pool import leave_room, target_alone
    from sglang_dflash.finish import create_req, update_finish_state
    from sglang_dflash.hits import leave_the_end
    from sglang_dflash.requests import refusal
    from sglang_dflash.served import add_dflash
    from sglang_dflash.state_pool import count_records
    from sglang_dflash.target_models import complete
    from sglang_dflash.weight_update import own_checkpoint_only

    hooks: Hooks = {
        VALIDATE_REQUEST: (lambda stock, request, overlap: refusal(request), HookType.AFTER),
        ROW_HEADROOM: (row_headroom, HookType.AFTER),
        FINISH: (update_finish_state, HookType.AROUND),
        SESSION: (create_req, HookType.AROUND),
        UPDATE_FROM_DISK: (own_checkpoint_only(config), HookType.AROUND),
        INTERNAL_STATE: (add_dflash, HookType.AFTER),
        START_METRICS: (start_metrics, HookType.AFTER),
        COUNT_STATES: (count_records, HookType.AROUND),
    }
    if config.draft_window is not None:
        hooks[KV_BYTES] = (leave_room(config), HookType.AROUND)
        hooks[KV_BYTES_PER_TOKEN] = (target_alone, HookType.AROUND)
        if not target.recurrent:
            hooks[LONGEST_HIT] = (leave_the_end, HookType.AFTER)
    set_hooks(hooks)
    complete(target.architecture)


def start_metrics(result: None, reporter: Any) -> None:
    """AFTER `SchedulerMetricsReporter.__post_init__`: a scheduler that reports metrics reports ours from now on."""
    if not reporter.current_scheduler_metrics_enabled:
        return
    host.check(METRICS)
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_dflash.metrics import Meter

    meter = Meter.of(reporter)
    set_hooks({OUTCOME: (meter.add, HookType.AFTER), IDLE: (meter.idle, HookType.AFTER)})


def set_hooks(hooks: "Hooks") -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    for name, (hook, kind) in hooks.items():
        HookRegistry.register(name, hook, kind)
    HookRegistry.apply_hooks()
    host.require_hooks(*hooks)


def add_old_flags(result: None, parser: ArgumentParser) -> None:
    """AFTER `ServerArgs.add_cli_args`: the flag names that model cards still use."""
    cli.add_old_names(parser)


def apply_flags(server_args: Any, previous: Callable[[Any], None]) -> None:
    """At the first step of argument resolution: what environment flags say about arguments."""
    if asks_for_dflash(server_args) and not flags.read(os.environ).overlap:
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, "sglang_dflash.flags", disable_overlap_schedule=True)
    previous(server_args)


def check_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around the step that resolves speculative arguments: refuse what cannot be served, before weights load."""
    if not asks_for_dflash(server_args) or flags.read(os.environ).worker is Worker.STOCK:
        previous(server_args)
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    from sglang_dflash.chooser import candidates
    from sglang_dflash.config import DFlashConfig

    require_live()
    config = DFlashConfig.from_server_args(server_args)
    candidates(flags.read(os.environ), config.block_size)  # raises when one is not within the block
    # Written out, so that SGLang's own resolution finds them decided and does not fall back to others.
    declare_resolution(
        server_args,
        "sglang_dflash.config",
        speculative_num_draft_tokens=config.block_size,
        speculative_draft_attention_backend=config.draft_attention_backend,
    )
    previous(server_args)
    keep_backend(server_args, config.draft_attention_backend)


def keep_backend(server_args: Any, name: str) -> None:
    """Declare the draft's backend again, where SGLang's resolution has replaced it.

    SGLang leaves `trtllm_mha` to drafts whose layers all slide, though its backend computes full ones too. What is
    declared decides the dtype of the draft's KV cache, and the bytes SGLang counts for it.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    replaced = resolving_view(server_args).speculative_draft_attention_backend
    if replaced != name:
        logger.info("the draft's attention backend stays %s, where SGLang's warning says %s", name, replaced)
        declare_resolution(server_args, "sglang_dflash.config", speculative_draft_attention_backend=name)


def asks_for_dflash(server_args: Any) -> bool:
    from sglang.srt.arg_groups.overrides import resolving_view

    return (resolving_view(server_args).speculative_algorithm or "").upper() == "DFLASH"


def require_live() -> None:
    """Check that a DFLASH launch of this process reaches our worker, or was not meant to.

    The CPU platform asks as well: SGLang loads it even where `SGLANG_PLUGINS` leaves the plugin out.

    Raises:
        HostMismatch: the plugin is not loaded, or SGLang could not apply one of its hooks.
    """
    if flags.read(os.environ).worker is not Worker.STOCK:
        host.require_hooks(CREATE_WORKER, ADD_CLI_ARGS)
