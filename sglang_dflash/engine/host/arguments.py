"""Server arguments that concern the draft, and facts about the target, read from SGLang before a worker exists.

`Arguments` and `TargetFacts` have no types of SGLang, so that `config.combine` and its tests run without SGLang.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sglang_dflash import flags
from sglang_dflash.engine.host.target_models import GIVE_LAST, why_no_features
from sglang_dflash.errors import NotSupported

# SGLang's arguments that are refused with DFLASH, with the reason.
UNSUPPORTED = {
    "enable_unified_memory": "it keeps the draft's K/V in the target's pages, but this plugin has a separate pool",
    "enable_unified_cache_external_linker": "it takes a draft's K/V only for hybrid MLA targets, which were not tested",
    "disaggregation_decode_enable_offload_kvcache": "only the target's K/V would be offloaded",
    "enable_two_batch_overlap": "verify cannot split a batch in two",
    "enable_linear_replayssm": "a step of one token would put its state change where this plugin does not read",
    "enable_linear_replayssm_spec": "this plugin records the state changes of a block itself",
    "enable_return_indexer_topk": "SGLang's start of a draft removes its recorder of these values",
    "enable_torch_compile": "it was not tested, and would compile for each batch size and verify width of a graph",
    "kt_weight_path": "kt-kernel prepares its buffers for one list of batch sizes, but each verify width has its own",
    "is_embedding": "a server for embeddings generates no text",
    "use_ray": "Ray's schedulers do not load plugins",
    "debug_tensor_dump_output_folder": "SGLang's dump needs a module named `model`, which a draft lacks",
}
# SGLang's arguments for other algorithms, which change nothing with DFLASH. The log names each with this reason.
IGNORED = {
    "speculative_num_steps": "DFLASH drafts a block in one forward; --speculative-num-draft-tokens sets its size",
    "speculative_eagle_topk": "DFLASH drafts one chain, not a tree",
    "speculative_draft_sink_size": "a draft window keeps the latest tokens only",
    "speculative_adaptive": "it adapts EAGLE's steps; SGLANG_DFLASH_WIDTHS=auto adapts the number of verified tokens",
    "speculative_use_block_verification": "it changes nothing for drafts that are not sampled",
    "speculative_use_rejection_sampling": "sampled answers have the target's distribution without it",
}
BY_DEFAULT = {"speculative_num_steps": 1, "speculative_eagle_topk": 1}  # SGLang's values with DFLASH


@dataclass(frozen=True)
class TargetFacts:
    """Facts about the target, for checks of the draft and for the settings of the server."""

    path: str
    architecture: str
    hidden_size: int
    vocab_size: int
    n_layers: int
    dtype: str
    recurrent: bool  # some layers keep a recurrent state instead of K and V
    gated_delta_net: bool = False  # the recurrent layers are Gated DeltaNet's
    context_length: int = 0  # largest number of tokens of a request
    gives_last: bool = False  # SGLang's model also gives the output of its last layer, before the final norm
    no_features: str = ""  # why SGLang's model of the target gives a draft no features; "" if it gives them


@dataclass(frozen=True)
class Arguments:
    """Server arguments that concern the draft. None means "not given", or not resolved by SGLang yet."""

    draft_path: str | None
    draft_revision: str | None
    block_size: int | None
    draft_window: int | None
    draft_backend: str | None
    target_backend: str | None
    draft_kv_dtype: str
    draft_quantization: str | None  # also None if SGLang has filled in the target's value
    device: str
    tp_size: int
    pp_size: int
    attention_dp: bool
    attention_dp_size: int  # number of groups of data-parallel attention
    dp_lm_head: bool
    disaggregation: str
    accept_thresholds: tuple[float, float]
    unsupported: tuple[str, ...]  # given arguments that are in `UNSUPPORTED`
    ignored: tuple[str, ...]  # those in `IGNORED` whose value is not SGLang's own
    sized_after_capture: bool  # SGLANG_ENABLE_POST_CAPTURE_KV_SIZING
    streaming_session: bool
    page_size: int | None
    load_format: str = "auto"
    draft_load_format: str | None = None
    host_cache: bool = False  # `--enable-hierarchical-cache`
    grammar_backend: str | None = None  # None: not resolved yet, which means xgrammar
    deterministic: bool = False  # `--enable-deterministic-inference`, which `--rl-on-policy-target` sets too
    model_impl: str = "auto"
    heads_first: bool = False  # SGLANG_USE_HND_KVCACHE: a page of the KV cache holds the tokens of each head together
    pipeline_rows: bool = False  # SGLANG_ENABLE_PP_SPEC: a verify stores windows by rows of the request table
    metric_labels: tuple[str, ...] = ()  # names in `--extra-metric-labels`
    memory_saver: bool = False  # `--enable-memory-saver`
    backs_up_draft: bool = False  # when weights are released, the host keeps a copy of the draft's weights
    max_requests: int | None = None  # `--max-running-requests`
    returns_hidden_states: bool = False  # `--enable-return-hidden-states` or `--return-hidden-states-mode`
    deepep_rows: int | None = None  # token rows of a rank that DeepEP's low-latency buffers hold; None: not used

    def require_draft_path(self) -> str:
        """Return the draft's path.

        Raises:
            ValueError: there is no draft.
        """
        if self.draft_path is None:
            raise ValueError("DFLASH needs a draft model; give --speculative-draft-model-path")
        return self.draft_path

    def require_rollback(self) -> None:
        """Check that grammars can roll back rejected drafts, or raise NotSupported."""
        if self.grammar_backend == "outlines":
            raise NotSupported(
                "--grammar-backend outlines is not supported with DFLASH (its grammars cannot take back a rejected "
                "draft); give xgrammar or llguidance"
            )

    def require_backup(self) -> None:
        """Check that a release of the weights keeps the draft's, or raise NotSupported."""
        if self.memory_saver and not self.backs_up_draft:
            raise NotSupported(
                "--enable-memory-saver without a copy of the draft's weights is not supported with DFLASH (a release "
                "of the weights would lose the draft); add --enable-draft-weights-cpu-backup, or "
                "--enable-weights-cpu-backup, which also keeps the target's"
            )

    def require_hidden_states(self) -> None:
        """Check that requests may ask for hidden states, or raise ValueError."""
        if not self.returns_hidden_states:
            raise ValueError(
                "SGLANG_DFLASH_HIDDEN_STATES=features has no effect without --enable-return-hidden-states; add the "
                "flag, or unset the variable"
            )


def arguments_of(server_args: Any) -> Arguments:
    """Read the arguments from SGLang's view, which includes resolved values."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import attn_dp_enabled_of

    args = resolving_view(server_args)
    target_backend, _ = attention_backends_of(args)
    return Arguments(
        draft_path=args.speculative_draft_model_path,
        draft_revision=args.speculative_draft_model_revision,
        # After resolution `speculative_num_draft_tokens` may be a verify width that exceeds the block size. Then
        # `speculative_dflash_block_size` is the block size.
        block_size=least_given(args.speculative_num_draft_tokens, args.speculative_dflash_block_size),
        draft_window=args.speculative_draft_window_size,
        draft_backend=args.speculative_draft_attention_backend,
        target_backend=target_backend,
        draft_kv_dtype=args.speculative_draft_kv_cache_dtype or args.kv_cache_dtype,
        draft_quantization=(
            args.speculative_draft_model_quantization if args._speculative_draft_quantization_explicitly_set else None
        ),
        device=device_of(args.device),
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        attention_dp=attn_dp_enabled_of(args),
        attention_dp_size=args.attn_dp_size,
        dp_lm_head=args.enable_dp_lm_head,
        disaggregation=args.disaggregation_mode,
        accept_thresholds=(args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc),
        unsupported=tuple(name for name in UNSUPPORTED if is_given(attrgetter(name)(args))),
        ignored=tuple(
            name for name in IGNORED if is_given(found := attrgetter(name)(args)) and found != BY_DEFAULT.get(name)
        ),
        sized_after_capture=envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get(),
        streaming_session=args.enable_streaming_session,
        page_size=args.page_size,
        load_format=args.load_format,
        draft_load_format=args.speculative_draft_load_format,
        host_cache=args.enable_hierarchical_cache,
        grammar_backend=args.grammar_backend,
        deterministic=args.enable_deterministic_inference or args.rl_on_policy_target is not None,
        model_impl=args.model_impl,
        heads_first=envs.SGLANG_USE_HND_KVCACHE.get(),
        pipeline_rows=envs.SGLANG_ENABLE_PP_SPEC.get(),
        metric_labels=tuple(args.extra_metric_labels or ()),
        memory_saver=args.enable_memory_saver,
        backs_up_draft=args.enable_weights_cpu_backup or args.enable_draft_weights_cpu_backup,
        max_requests=args.max_running_requests,
        returns_hidden_states=args.enable_return_hidden_states or args.return_hidden_states_mode is not None,
        deepep_rows=deepep_rows_of(args),
    )


def deepep_rows_of(args: Any) -> int | None:
    """Return the token rows of a rank that DeepEP's low-latency buffers hold; None if they are not used."""
    from sglang.srt.environ import envs

    if args.moe_a2a_backend != "deepep" or args.deepep_mode == "normal":
        return None
    return envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()


def flag(name: str) -> str:
    """Return the flag of an argument: `--enable-lora` for `enable_lora`."""
    return "--" + name.replace("_", "-")


def is_given(value: object) -> bool:
    """Return whether `value` is neither None, False nor an empty list; 0 counts as given."""
    return not (value is None or value is False or value == [])


def least_given(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def target_of(server_args: Any) -> TargetFacts:
    """Return facts from SGLang's config of the target."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config

    model_config = model_config_of(server_args)
    text, architectures = model_config.hf_text_config, model_config.hf_config.architectures
    return TargetFacts(
        path=model_config.model_path,
        architecture=architectures[0],
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        n_layers=text.num_hidden_layers * text.to_dict().get("num_loops", 1),  # looped targets: layers times passes
        dtype=str(model_config.dtype).removeprefix("torch."),
        recurrent=mambaish_config(model_config) is not None,
        gated_delta_net=hybrid_gdn_config(model_config) is not None,
        context_length=model_config.context_len,
        gives_last=architectures[0] in GIVE_LAST,
        no_features=why_no_features(architectures),
    )


def device_of(device: str | None) -> str:
    """Return "cpu", an NVIDIA GPU's generation such as "sm80", "sm89" or "sm120", or another device's name.

    If a GPU is emulated, its generation is returned. Compute capability 8.9 is distinguished from other 8.x, because
    only 8.9 has fp8. "undecided" means that SGLang has not resolved the device.
    """
    if device is None:
        return "undecided"
    if not device.startswith("cuda"):
        return flags.current().rehearse.gpu or device
    import torch

    if not torch.version.cuda:
        return "rocm"  # in torch, ROCm devices are named "cuda"
    capability = torch.cuda.get_device_capability()
    return "sm89" if capability == (8, 9) else f"sm{capability[0]}0"


def asks_for_dflash(server_args: Any) -> bool:
    from sglang.srt.arg_groups.overrides import resolving_view

    return (resolving_view(server_args).speculative_algorithm or "").upper() == "DFLASH"
