"""`DFlashConfig`: frozen record of every choice made before weights load. Building it checks the choices.

The choices depend on the draft checkpoint, the server's arguments, the target and the environment flags. Each of the
four has a record, and `combine` is a pure function of these records. So its errors are tested without SGLang. Each
error is one sentence and names the flag or field to change. `host/arguments.py` reads SGLang's arguments.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft.pair import check_pair
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.engine.host import backends, fit
from sglang_dflash.engine.host.arguments import UNSUPPORTED, Arguments, TargetFacts, arguments_of, flag, target_of
from sglang_dflash.engine.memory.texts import why_no_copies
from sglang_dflash.engine.width.chooser import candidates, widest
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import Copy, Flags, GdnState, WidthPolicy, current, require_trace_folder

if TYPE_CHECKING:
    from sglang_dflash.engine.memory.draft_kv import DraftKV

DRAFT_QUANTIZATIONS = ("fp8", "unquant")
METRIC_LABELS = ("match", "pool", "position", "stage", "width")  # of the metrics in `metrics/table.py`
FP8_DEVICES = ("undecided", "cpu", "sm89", "sm90", "sm100", "sm110", "sm120")  # values of `device_of` that allow fp8


@dataclass(frozen=True)
class DFlashConfig:
    """Immutable configuration of this process's server, read by the worker and by the hooks into SGLang.

    Attributes:
        block_size: N, tokens per block: the anchor and the drafts. May exceed the draft's trained size, see
            `fit.block_size`.
        widths: verify widths, in tokens per request, that a step may have, ascending; empty on a prefill-only server.
        copy: use of n-gram copies in place of a block's last drafts; OFF if this server cannot copy.
        gdn_state: method that advances the target's recurrent states; None if it has no such states or this
            server never verifies.
        attention_dp: attention is data parallel, so groups of ranks serve different requests.
        slots_are_ours: SGLang copies no K/V out of or into KV slots. False with a host cache
            (`--enable-hierarchical-cache`), which copies K/V to the host and back, and with disaggregation.
        draft_quantization: value for `--speculative-draft-model-quantization`, applied to the draft's linear layers at
            load; None: not quantized, even if the target is.
        dtype: dtype of the target, also used for the draft's weights and activations, e.g. "bfloat16".
        draft_load_format: value for `--speculative-draft-load-format`; None: the target's format.
        draft_window: number of context tokens per request that the draft keeps and attends to; None: all. The smaller
            of `--speculative-draft-window-size` and, if every draft layer is a sliding layer, the checkpoint's window.
            With disaggregation always None, see `fit.layers`.
        draft_attention_backend: attention backend of the draft, see `backends.resolve`.
        disaggregation: value of `--disaggregation-mode`.
        draft: fields of the draft checkpoint.
        target: facts about the target.
        flags: environment flags.
        notes: sentences for the log, see `fit.notes`.
        ignored: sentences for the log about flags without an effect, see `fit.ignored`.
    """

    block_size: int
    widths: tuple[int, ...]
    copy: Copy
    gdn_state: GdnState | None
    attention_dp: bool
    slots_are_ours: bool
    draft_quantization: str | None
    dtype: str
    draft_load_format: str | None
    draft_window: int | None
    draft_attention_backend: str
    disaggregation: str
    draft: Checkpoint
    target: TargetFacts = field(repr=False)
    flags: Flags = field(repr=False)
    notes: tuple[str, ...] = field(repr=False)
    ignored: tuple[str, ...] = field(repr=False)

    @classmethod
    def from_server_args(cls, server_args: Any) -> "DFlashConfig":
        """Build the configuration of this process.

        Args:
            server_args: SGLang's `ServerArgs`, during or after SGLang's resolution of arguments.
        Raises:
            ValueError: see `flags.read`, `check_arguments`, `checkpoint.read` and `combine`.
            NotSupported: see `check_arguments`, `checkpoint.read` and `combine`.
        """
        flags, arguments = current(), arguments_of(server_args)
        check_arguments(arguments, flags)
        draft = checkpoint.read(arguments.require_draft_path(), arguments.draft_revision)
        return combine(arguments, target_of(server_args), draft, flags)

    def summary(self) -> str:
        """Return block, verify widths, n-gram copies, draft window, draft attention backend and draft in one line."""
        facts = {
            "block": self.block_size,
            "verify widths": "/".join(map(str, self.widths)) or "none",
            "n-gram copies": self.copy.value,
            "draft window": self.draft_window or "off",
            "draft attention backend": self.draft_attention_backend,
            "draft": self.draft.path,
        }
        if self.flags.simulated:
            facts["answers are meaningless, because acceptance is simulated:"] = self.flags.simulated
        return ", ".join(f"{name} {value}" for name, value in facts.items())

    def choices(self) -> dict[str, object]:
        """Return the choices that fix the shapes and steps of a server, by their name in messages."""
        return {
            "the block size": self.block_size,
            "the list of verify widths": self.widths,
            "the draft's window": self.draft_window,
            "the dtype": self.dtype,
        }

    @property
    def n_slots(self) -> int:
        """Return the number of slots of a drafted block.

        In an anchor-first draft the anchor's slot predicts a token too, so N tokens need only N - 1 slots.
        """
        return self.block_size - self.draft.sample_from_anchor

    @property
    def widest(self) -> int:
        """Return the largest number of tokens per request whose K/V a step writes."""
        return widest(self.block_size, self.widths)

    @cached_property
    def draft_kv(self) -> "DraftKV":
        """Return the storage of the draft's context K/V. Its hooks make SGLang count the memory."""
        from sglang_dflash.engine.memory.draft_kv import draft_kv

        return draft_kv(self.draft_window, self.widest, self.disaggregation)


def combine(arguments: Arguments, target: TargetFacts, draft: Checkpoint, flags: Flags) -> DFlashConfig:
    """Check the four records against each other and build the configuration.

    Args:
        arguments: server arguments that `check_arguments` has accepted.
    Raises:
        ValueError: two records contradict each other.
        NotSupported: the records require something that this version cannot serve exactly.
    """
    if target.no_features:
        raise NotSupported(f"{target.path}: {target.no_features}; serve this target without DFLASH")
    sizes = {name: vars(target)[name] for name in ("hidden_size", "vocab_size", "n_layers", "gives_last")}
    check_pair(draft, target.path, **sizes)
    block_size = fit.block_size(arguments, draft)
    fit.check_flash_rl(arguments, draft)
    fit.check_heads(arguments, draft)
    draft_window, layers = fit.window(arguments, draft, block_size), fit.layers(arguments, draft)
    fit.check_sessions(arguments, draft_window)
    fit.check_rings(arguments, draft_window)
    fit.check_disaggregation(arguments, draft)
    no_copies = _no_copies(arguments, flags)
    verifies = arguments.disaggregation != "prefill"
    whole_blocks = why_whole_blocks(arguments, target, flags) if verifies else ""
    widths = candidates(flags, block_size, no_copies, whole_blocks)
    if arguments.deterministic and flags.width_policy is WidthPolicy.AUTO and not flags.widths:
        widths = (block_size,)
    if verifies:
        fit.check_deepep(arguments, widths)
    return DFlashConfig(
        draft=draft,
        target=target,
        flags=flags,
        block_size=block_size,
        widths=widths if verifies else (),
        copy=Copy.OFF if no_copies else flags.copy,
        gdn_state=_gdn_state(target, flags) if verifies else None,
        attention_dp=arguments.attention_dp,
        slots_are_ours=arguments.disaggregation == "null" and not arguments.host_cache,
        draft_quantization=None if arguments.draft_quantization == "unquant" else arguments.draft_quantization,
        dtype=target.dtype,
        draft_load_format=fit.load_format(arguments),
        notes=fit.notes(arguments, target, draft),
        ignored=fit.ignored(arguments),
        draft_window=draft_window,
        disaggregation=arguments.disaggregation,
        draft_attention_backend=backends.resolve(
            asked=arguments.draft_backend,
            target=arguments.target_backend,
            needs=_needs(arguments, layers),
        ),
    )


def _no_copies(arguments: Arguments, flags: Flags) -> str:
    conditions = {"is_simulated": flags.simulated is not None, "is_deterministic": arguments.deterministic}
    return why_no_copies(flags.copy, arguments.disaggregation, **conditions)


def _needs(arguments: Arguments, draft: Checkpoint) -> backends.Needs:
    return backends.Needs(
        whole_blocks=(None in draft.layer_windows and not draft.full_is_causal) or not draft.sliding_is_causal,
        slides=any(draft.layer_windows),
        slides_both_ways=not draft.sliding_is_causal,
        sinks=draft.attention_sink_bias,
        device=arguments.device,
        kv_dtype=arguments.draft_kv_dtype,
        page_size=arguments.page_size,
    )


# -- checks of the arguments ---------------------------------------------------------------------------------------


def check_arguments(arguments: Arguments, flags: Flags) -> None:
    """Refuse flags that this version does not support with DFLASH. SGLang accepts some of them with a warning.

    Raises:
        ValueError: a flag contradicts DFLASH, the draft is missing, or a trace cannot be written.
        NotSupported: a flag is not supported with DFLASH, see `UNSUPPORTED`.
    """
    arguments.require_draft_path()
    require_trace_folder(flags)
    for name, value in zip(("single", "acc"), arguments.accept_thresholds, strict=True):
        if value != 1.0:
            raise NotSupported(
                f"--speculative-accept-threshold-{name} {value} would change the output distribution; drop the flag"
            )
    if arguments.draft_quantization not in (None, *DRAFT_QUANTIZATIONS):
        raise NotSupported(
            f"--speculative-draft-model-quantization {arguments.draft_quantization} is not supported with DFLASH (a "
            f"draft can only be quantized to fp8, while it loads); give {' or '.join(DRAFT_QUANTIZATIONS)}"
        )
    for name in arguments.unsupported:
        raise NotSupported(f"{flag(name)} is not supported with DFLASH ({UNSUPPORTED[name]}); drop the flag")
    if arguments.model_impl not in ("auto", "sglang"):
        raise NotSupported(
            f"--model-impl {arguments.model_impl} is not supported with DFLASH (only SGLang's own model classes give "
            "features to a draft); drop the flag"
        )
    if arguments.heads_first:
        raise NotSupported(
            "SGLANG_USE_HND_KVCACHE=1 is not supported with DFLASH (the draft's K/V are written with a token's heads "
            "side by side); set SGLANG_USE_HND_KVCACHE=0"
        )
    if arguments.pipeline_rows:
        raise NotSupported(
            "SGLANG_ENABLE_PP_SPEC=1 is not supported with DFLASH (it is for pipeline parallelism, and moves the "
            "convolution windows of a verify); set SGLANG_ENABLE_PP_SPEC=0"
        )
    if taken := [label for label in METRIC_LABELS if label in arguments.metric_labels]:
        raise NotSupported(
            f"--extra-metric-labels has {', '.join(taken)}, and metrics of sglang-dflash have labels of this name; "
            "give another name"
        )
    arguments.require_rollback()
    arguments.require_backup()
    _check_parallel(arguments)
    if flags.fp8_head:
        _check_fp8_head(arguments)
    if flags.returns_features:
        arguments.require_hidden_states()


def _check_fp8_head(arguments: Arguments) -> None:
    if arguments.device not in FP8_DEVICES:
        raise NotSupported(
            f"SGLANG_DFLASH_DRAFT_HEAD=fp8 needs an NVIDIA GPU of compute capability 8.9 or more, found "
            f"{arguments.device}; set SGLANG_DFLASH_DRAFT_HEAD=full"
        )
    if arguments.load_format == "flash_rl":
        raise NotSupported(
            "SGLANG_DFLASH_DRAFT_HEAD=fp8 with --load-format flash_rl is not supported (the copy of the head would not "
            "follow updates of the target); set SGLANG_DFLASH_DRAFT_HEAD=full"
        )


def _check_parallel(arguments: Arguments) -> None:
    if arguments.pp_size != 1:
        raise NotSupported(
            f"--pp-size {arguments.pp_size}: the draft needs features of layers on other stages; use --pp-size 1"
        )
    if arguments.attention_dp and not arguments.dp_lm_head:
        raise NotSupported(
            "attention data parallelism without --enable-dp-lm-head is not supported with DFLASH (the draft borrows "
            "the head, and runs among the ranks that share requests); add --enable-dp-lm-head"
        )


# -- facts about the target ---------------------------------------------------------------------------------------


def why_whole_blocks(arguments: Arguments, target: TargetFacts, flags: Flags) -> str:
    """Return the reason why a step must verify the whole block; "" if other widths are possible.

    Simulated acceptance would be equal at all widths from `Simulated.length` on, so no policy could choose among them.
    Among recurrent layers, only Gated DeltaNet supports other widths. For Mamba2, SGLang stores a state per block
    token. SGLang's verify locates a request's states by the number of verified tokens. SGLang's commit locates them by
    the pool's block size, so both numbers must be equal.
    """
    if flags.simulated:
        return "simulated acceptance does not depend on the width; --speculative-num-draft-tokens sets the block size"
    if arguments.attention_dp:
        return "attention data parallelism supports no other width"
    if target.recurrent and not target.gated_delta_net:
        return "SGLang locates the recurrent states of this target by the block size"
    return ""


def _gdn_state(target: TargetFacts, flags: Flags) -> GdnState | None:
    if not target.recurrent:
        return None
    return flags.gdn_state if target.gated_delta_net else GdnState.SNAPSHOT
