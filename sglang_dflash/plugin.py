"""Entry point `register`, which SGLang calls to load this plugin, and the hooks that `register` sets.

SGLang logs and ignores an error in `register`. Checks therefore run inside the hooks, where an error stops the launch.
If SGLang has another version or lacks a name to hook, only launches with DFLASH are refused (`host/other_sglang.py`).
`engine/hooks.py` sets the further hooks of a scheduler with DFLASH.

A launch is checked twice. The launching process checks it when it resolves the arguments, seconds after the start. Each
scheduler process checks it before it builds the worker. A program may resolve arguments without plugins, so the second
check also compares them with the values that the first one declares.
"""

import logging
import os
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sglang_dflash import flags
from sglang_dflash.engine.host import contract as host
from sglang_dflash.engine.host import loading
from sglang_dflash.engine.host.arguments import asks_for_dflash
from sglang_dflash.engine.host.names import HOOKS
from sglang_dflash.engine.host.other_sglang import stand_aside
from sglang_dflash.errors import HostMismatch, NotSupported
from sglang_dflash.flags import Worker

if TYPE_CHECKING:
    from sglang_dflash.engine.config import DFlashConfig

logger = logging.getLogger(__name__)


def register() -> None:
    """Set the hooks. SGLang calls this once per process with plugins, before it parses arguments or builds a worker."""
    try:
        host.require_seams()
    except HostMismatch as mismatch:
        stand_aside(mismatch)
        return
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dflash.engine.draft.sglang_config import as_long_as_the_target, not_quantized, read_draft
    from sglang_dflash.platforms.cpu.platform import register_choices, require_device

    HookRegistry.register(HOOKS["create_worker"], create_worker, HookType.AROUND)
    HookRegistry.register(HOOKS["add_cli_args"], add_old_flags, HookType.AFTER)
    HookRegistry.register(HOOKS["read_draft"], read_draft, HookType.AROUND)
    HookRegistry.register(HOOKS["draft_length"], as_long_as_the_target, HookType.AROUND)
    HookRegistry.register(HOOKS["draft_packing"], not_quantized, HookType.AROUND)
    HookRegistry.register(HOOKS["check_server_args"], prepare_tokenizer, HookType.AFTER)
    register_resolution_hook("handle_mega_moe")(apply_flags)
    register_resolution_hook("handle_missing_default_values")(require_device)
    register_resolution_hook("handle_speculative_decoding")(check_arguments)
    register_choices()


def create_worker(stock: Callable[..., type], algorithm: Any, server_args: Any) -> Callable[..., Any]:
    """Return the constructor of the worker. Hook around `SpeculativeAlgorithm.create_worker`.

    For other algorithms, or with SGLANG_DFLASH_WORKER=stock, the worker is SGLang's. SGLang calls this method on every
    rank, after it has built the target. With DFLASH the ranks are compared first, also with SGLang's worker.
    """
    if not algorithm.is_dflash():
        return stock(algorithm, server_args)
    if flags.current().worker is Worker.STOCK:
        from sglang_dflash.engine.host.agreement import require_equal

        require_equal(server_args, {})
        return stock(algorithm, server_args)
    host.require()
    from sglang.srt.models.registry import ModelRegistry

    from sglang_dflash.engine.config import DFlashConfig
    from sglang_dflash.engine.draft.sglang_model import DFlashDraftModel
    from sglang_dflash.engine.draft.variants import ARCHITECTURES
    from sglang_dflash.engine.hooks import hook_scheduler
    from sglang_dflash.engine.host.agreement import require_equal
    from sglang_dflash.engine.worker import DFlashWorker

    config = DFlashConfig.from_server_args(server_args)
    require_declared(server_args, config)
    require_equal(server_args, config.choices())
    for note in config.notes:
        logger.info(note)
    ModelRegistry.models.update(dict.fromkeys(ARCHITECTURES, DFlashDraftModel))
    hook_scheduler(config)
    if config.flags.probe:
        from sglang_dflash.tools.prove.probe import ProbedWorker

        return partial(ProbedWorker, config)
    return partial(DFlashWorker, config)


def add_old_flags(result: None, parser: ArgumentParser) -> None:
    """Add old flag names that model cards use. Hook after `ServerArgs.add_cli_args`."""
    flags.add_old_names(parser)


def apply_flags(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Disable the overlap schedule if an environment flag disables it. Wraps the second step of argument resolution.

    Raises:
        NotSupported: see `loading.read_flags_again`.
    """
    loading.read_flags_again()
    if asks_for_dflash(server_args) and not flags.current().overlap:
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, "sglang_dflash.flags", disable_overlap_schedule=True)
    previous(server_args)


def check_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse unsupported launches before weights load. Wraps the resolution of the speculative arguments."""
    if flags.current().worker is Worker.STOCK:
        previous(server_args)
        return
    if asks_for_dflash(server_args):
        resolve(server_args, previous)
    else:
        previous(server_args)


def prepare_tokenizer(result: None, server_args: Any) -> None:
    """Set hooks that check requests in every process that tokenizes, for servers with and without speculation.

    Hook after `ServerArgs.check_server_args`. Every launch calls this method after it has loaded plugins, and before it
    creates a tokenizer.

    Raises:
        NotSupported: see `require_same_flags`, `refuse_ray` and `require_free_port` of `loading`.
    """
    if asks_for_dflash(server_args):
        loading.require_same_flags()
        loading.refuse_ray()
        if loading.is_for_http():
            loading.require_free_port(server_args)
    if flags.current().worker is Worker.STOCK:
        return
    from sglang_dflash.engine.host.admission import hook_tokenizer

    hook_tokenizer()
    if server_args.tokenizer_worker_num > 1:  # separate tokenizer processes, which do not load plugins
        os.environ.setdefault("SGLANG_HTTP_SERVER_APP_PATH", "sglang_dflash.engine.host.http_app:app")


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check the arguments of DFLASH and declare the resolved values."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    from sglang_dflash.engine.config import DFlashConfig

    host.require_live()
    config = DFlashConfig.from_server_args(server_args)
    for sentence in config.ignored:  # only here: SGLang's own resolution resets some of these arguments
        logger.warning(sentence)
    # SGLang's own resolution keeps declared values, except the attention backend in some cases, see `keep_backend`.
    declare_resolution(server_args, "sglang_dflash.engine.config", **declared(config))
    previous(server_args)
    keep_backend(server_args, config.draft_attention_backend)
    if config.widest > config.block_size:
        # SGLang computes KV slot reservations and graph sizes from `speculative_num_draft_tokens`, so this must be the
        # widest verify. `speculative_dflash_block_size` keeps the block size.
        declare_resolution(
            server_args,
            "sglang_dflash.engine.width",
            speculative_num_draft_tokens=config.widest,
            speculative_dflash_block_size=config.block_size,
        )


def declared(config: "DFlashConfig") -> dict[str, Any]:
    """Return SGLang's arguments that a server with DFLASH sets, by name."""
    return {
        "speculative_num_draft_tokens": config.block_size,
        "speculative_draft_attention_backend": config.draft_attention_backend,
        "speculative_draft_model_quantization": config.draft_quantization,
        "speculative_draft_load_format": config.draft_load_format,
        "dtype": config.dtype,  # the draft gets the target's dtype even if its own file names another
    }


def require_declared(server_args: Any, config: "DFlashConfig") -> None:
    """Check that the resolved arguments have the values that `resolve` declares.

    Values differ if a program resolved `ServerArgs` before plugins and this package's platform were loaded, see
    `engine/host/loading.py`.

    Raises:
        NotSupported: an argument has another value.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    resolved = resolving_view(server_args)
    wanted = declared(config) | {"speculative_num_draft_tokens": config.widest}
    for name, value in wanted.items():
        found = attrgetter(name)(resolved)
        if found != value:
            raise NotSupported(
                f"{name} was resolved to {found} without sglang-dflash, which needs {value}: these arguments were "
                "resolved before plugins were loaded; call sglang.srt.plugins.load_plugins() before you build "
                "ServerArgs, or use sglang.Engine"
            )


def keep_backend(server_args: Any, name: str) -> None:
    """Declare the draft's backend again if SGLang's resolution has replaced it.

    SGLang replaces `trtllm_mha` if a draft has a full-attention layer and is not causal, although this backend supports
    such layers. The draft's KV cache gets its dtype and its reserved bytes from the declared backend.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    replaced = resolving_view(server_args).speculative_draft_attention_backend
    if replaced != name:
        logger.info("the draft's attention backend is still %s, although SGLang's warning names %s", name, replaced)
        declare_resolution(server_args, "sglang_dflash.engine.config", speculative_draft_attention_backend=name)
