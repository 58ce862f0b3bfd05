"""DFlashConfig: accepted and refused combinations of draft, target and flags."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from sglang_dflash import flags
from sglang_dflash.engine import config
from sglang_dflash.engine.config import METRIC_LABELS, check_arguments, combine
from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft.record import FULL, SLIDING, Checkpoint
from sglang_dflash.engine.host.arguments import IGNORED, UNSUPPORTED, Arguments, TargetFacts, flag, is_given
from sglang_dflash.engine.host.names import SECTIONS
from sglang_dflash.engine.metrics.table import METRICS
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import Copy, GdnState

TARGET = TargetFacts(
    "target", "Qwen3ForCausalLM", hidden_size=64, vocab_size=128, n_layers=4, dtype="bfloat16", recurrent=False
)
ARGUMENTS = Arguments(
    draft_path="draft", draft_revision=None, block_size=None, draft_window=None, draft_backend=None,
    target_backend="fa3", draft_kv_dtype="auto", draft_quantization=None, device="sm90", tp_size=1, pp_size=1,
    attention_dp=False, attention_dp_size=1, dp_lm_head=False, disaggregation="null", ignored=(),
    accept_thresholds=(1.0, 1.0), unsupported=(), sized_after_capture=False, streaming_session=False, page_size=None,
)  # fmt: skip
SIMULATED = {"SGLANG_SIMULATE_ACC_LEN": "4"}
FLAGS, FP8_HEAD = flags.read({}), flags.read({"SGLANG_DFLASH_DRAFT_HEAD": "fp8"})


@pytest.fixture(scope="module")
def draft(checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint.read(str(checkpoints.write_draft(tmp_path_factory.mktemp("config") / "draft")))


def test_defaults_come_from_the_checkpoint(draft):
    served = combine(ARGUMENTS, TARGET, draft, FLAGS)
    assert (served.block_size, served.draft_window, served.dtype) == (8, None, "bfloat16")
    assert served.draft_attention_backend == "fa3"
    assert served.draft is draft


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_a_block_may_be_a_prefix_of_the_trained_one(block_size, draft):
    """The window may be as small as the block."""
    served = combine(replace(ARGUMENTS, block_size=block_size, draft_window=block_size), TARGET, draft, FLAGS)
    assert (served.block_size, served.draft.block_size, served.draft_window) == (block_size, 8, block_size)


def test_deterministic_inference_fixes_the_width_and_makes_no_copies(draft):
    """Widths and copies follow measured times and earlier requests, so answers could differ between runs."""
    arguments = replace(ARGUMENTS, deterministic=True)
    served = combine(arguments, TARGET, draft, FLAGS)
    assert (served.widths, served.copy) == ((8,), Copy.OFF)
    assert any("--enable-deterministic-inference: by default all steps verify whole" in note for note in served.notes)
    assert len(combine(ARGUMENTS, TARGET, draft, FLAGS).widths) > 1
    asked = flags.read({"SGLANG_DFLASH_WIDTHS": "1,8", "SGLANG_DFLASH_COPY": "on"})
    served = combine(arguments, TARGET, draft, asked)
    assert (served.widths, served.copy) == ((1, 8), Copy.ON)


def test_flags_of_other_algorithms_are_ignored_by_name(draft):
    served = combine(replace(ARGUMENTS, ignored=tuple(IGNORED)), TARGET, draft, FLAGS)
    assert served.ignored[0] == (
        "--speculative-num-steps is ignored: DFLASH drafts a block in one forward; --speculative-num-draft-tokens sets "
        "its size"
    )
    assert [sentence.split()[0] for sentence in served.ignored] == [flag(name) for name in IGNORED]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_draft_runs_in_the_targets_dtype(dtype, draft):
    assert combine(ARGUMENTS, replace(TARGET, dtype=dtype), replace(draft, dtype="float32"), FLAGS).dtype == dtype


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_size": 2}, {"tp_size": 4}, {"model_impl": "sglang"}, {"tp_size": 4, "deepep_rows": 128},
        {"tp_size": 2, "deepep_rows": 128, "max_requests": 32},
    ],
    ids=str,
)  # fmt: skip
def test_flags_that_restate_the_default_are_accepted(changes, draft):
    """Also accepted: `--tp-size` 2 and 4, which divide the draft's 4 heads, and verifies that fit DeepEP's buffers."""
    checked(replace(ARGUMENTS, **changes), draft)


@pytest.mark.parametrize(
    ("device", "asked", "kept"), [("sm90", None, "fa3"), ("sm100", "fa4", "fa4"), ("sm100", "trtllm_mha", "trtllm_mha")]
)
def test_an_fp8_target_keeps_the_drafts_backend(device, asked, kept, draft):
    """With an fp8 KV cache the draft uses the backend that its flag names, or without the flag the target's backend."""
    arguments = replace(ARGUMENTS, device=device, draft_backend=asked, draft_kv_dtype="fp8_e4m3", page_size=64)
    assert combine(arguments, TARGET, draft, FLAGS).draft_attention_backend == kept


def checked(arguments: Arguments, draft: Checkpoint) -> None:
    """Run the checks in the order of `DFlashConfig.from_server_args`."""
    check_arguments(arguments, FLAGS)
    combine(arguments, TARGET, draft, FLAGS)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"draft_path": None}, ValueError, "DFLASH needs a draft model; give --speculative-draft-model-path"),
        ({"block_size": 33}, ValueError, r"block size 33 is not within 2\.\.32: .*-block-size to 8 or less, or dr"),
        ({"block_size": 1}, ValueError, r"block size 1 is not within 2\.\.32"),
        ({"draft_window": 7}, ValueError, "--speculative-draft-window-size 7 is smaller than the block of 8; give at"),
        (
            {"unsupported": ("enable_torch_compile",)}, NotSupported,
            r"--enable-torch-compile is not supported with DFLASH \(it was not tested.*\); drop the flag$",
        ),
        ({"accept_thresholds": (0.9, 1.0)}, NotSupported, "--speculative-accept-threshold-single 0.9 would change"),
        ({"accept_thresholds": (1.0, 0.5)}, NotSupported, "--speculative-accept-threshold-acc 0.5 would change"),
        ({"draft_quantization": "awq"}, NotSupported, "--speculative-draft-model-quantization awq .* give fp8 or unq"),
        (
            {"model_impl": "transformers"}, NotSupported,
            r"^--model-impl transformers is not supported with DFLASH \(only SGLang's own .*\); drop the flag$",
        ),
        ({"model_impl": "mindspore"}, NotSupported, "^--model-impl mindspore is not supported"),
        (
            {"unsupported": ("kt_weight_path",)}, NotSupported,
            r"^--kt-weight-path is not supported with DFLASH \(kt-kernel .* each verify width has .*; drop the flag$",
        ),
        (
            {"tp_size": 2, "deepep_rows": 128, "max_requests": 34}, NotSupported,
            r"^SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=128 is too small: verifying 8 tokens of 34 requests "
            r"sends 136 rows per rank .*; set it to 136 .* --max-running-requests 32 or --deepep-mode normal$",
        ),
        (
            {
                "deepep_rows": 128, "attention_dp": True, "dp_lm_head": True, "tp_size": 4, "attention_dp_size": 4,
                "max_requests": 100,
            },
            NotSupported, "8 tokens of 25 requests sends 200 rows per rank .*, or give --max-running-requests 64 or",
        ),
        ({"pp_size": 2}, NotSupported, "--pp-size 2: .* use --pp-size 1"),
        ({"attention_dp": True}, NotSupported, "without --enable-dp-lm-head .*; add --enable-dp-lm-head"),
        (
            {"attention_dp": True, "dp_lm_head": True, "tp_size": 6, "attention_dp_size": 2}, ValueError,
            r"over 3 ranks \(--tp-size 6, 2 groups of .*\); set .* so that the ranks of a group are 1 or 2 or 4$",
        ),
        (
            {"disaggregation": "decode", "block_size": 4, "draft_window": 7}, ValueError,
            "--speculative-draft-window-size 7 is smaller than the block of 8; give at least 8",
        ),
        (
            {"tp_size": 3}, ValueError,
            r"4 heads and 2 KV heads cannot be split over 3 ranks \(--tp-size 3\); set --tp-size to 1 or 2 or 4$",
        ),
        ({"tp_size": 8}, ValueError, "cannot be split over 8 ranks"),
        ({"draft_backend": "trtllm_mha", "page_size": 1}, NotSupported, "trtllm_mha: it needs a --page-size of 16 or"),
        ({"draft_kv_dtype": "fp8_e5m2", "draft_backend": "fa3"}, NotSupported, "cannot use a draft KV cache of fp8_e5"),
        ({"draft_kv_dtype": "fp8_e4m3", "device": "sm80"}, NotSupported, "can use a draft KV cache of .* on sm80; set"),
        ({"draft_backend": "torch_native"}, NotSupported, "torch_native: it does not run on sm90"),
    ],
    ids=str,
)  # fmt: skip
def test_flags_without_an_exact_meaning_are_refused(changes, error, sentence, draft):
    with pytest.raises(error, match=sentence) as refusal:
        checked(replace(ARGUMENTS, **changes), draft)
    assert type(refusal.value) is error
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 128}, r"hidden_size 64 is not the target's 128 \(target\); give the draft that was trained"),
        ({"n_layers": 3}, r"_ids end at 2, and a target of 3 layers \(target\) gives features of layers 0..1"),
        ({"n_layers": 5}, "num_target_layers 4 is not the target's 5"),
    ],
    ids=str,
)
def test_a_draft_for_another_target_is_refused(changes, sentence, draft):
    with pytest.raises(ValueError, match=sentence):
        combine(ARGUMENTS, replace(TARGET, **changes), draft, FLAGS)


def test_a_target_without_features_is_refused(draft):
    combine(ARGUMENTS, TARGET, draft, FLAGS)
    with pytest.raises(NotSupported, match=r"^target: it has none; serve this target without DFLASH$"):
        combine(ARGUMENTS, replace(TARGET, no_features="it has none", hidden_size=128), draft, FLAGS)


def test_simulated_acceptance_verifies_whole_blocks_without_copies(draft):
    served = combine(ARGUMENTS, TARGET, draft, flags.read(SIMULATED))
    assert (served.widths, served.copy) == ((8,), Copy.OFF)
    assert served.summary().endswith("acceptance is simulated: 4 tokens per step (match-expected, fixed)")
    with pytest.raises(NotSupported, match=r"_COPY=on is not supported with SGLANG_SIMULATE_ACC_LEN .*COPY to auto or"):
        combine(ARGUMENTS, TARGET, draft, flags.read(SIMULATED | {"SGLANG_DFLASH_COPY": "on"}))
    with pytest.raises(NotSupported, match=r"_WIDTHS=1,8: this server verifies only whole blocks \(simulated accept"):
        combine(ARGUMENTS, TARGET, draft, flags.read(SIMULATED | {"SGLANG_DFLASH_WIDTHS": "1,8"}))


def test_streaming_sessions_with_pages_refuse_a_window(draft):
    asked = replace(ARGUMENTS, streaming_session=True, draft_window=64)
    combine(replace(asked, page_size=1), TARGET, draft, FLAGS)
    combine(replace(asked, page_size=16, draft_window=None), TARGET, draft, FLAGS)
    with pytest.raises(NotSupported, match=r"a draft window of 64 tokens and a page size of 16 .* set --page-size 1"):
        combine(replace(asked, page_size=16), TARGET, draft, FLAGS)


def test_sizing_after_capture_refuses_a_window(draft):
    asked = replace(ARGUMENTS, sized_after_capture=True)
    combine(asked, TARGET, draft, FLAGS)
    with pytest.raises(NotSupported, match=r"a draft window of 64 .*; set SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=0$"):
        combine(replace(asked, draft_window=64), TARGET, draft, FLAGS)


def test_rows_for_pipeline_parallelism_are_refused():
    with pytest.raises(NotSupported, match=r"^SGLANG_ENABLE_PP_SPEC=1 .*; set SGLANG_ENABLE_PP_SPEC=0$"):
        check_arguments(replace(ARGUMENTS, pipeline_rows=True), FLAGS)


def test_metric_labels_of_the_plugin_are_taken():
    """Prometheus refuses a label that is given twice, in the scheduler and after the start."""
    assert set(METRIC_LABELS) == {label for metric in METRICS for label in metric.labels}
    check_arguments(replace(ARGUMENTS, metric_labels=("region",)), FLAGS)
    with pytest.raises(NotSupported, match=r"^--extra-metric-labels has pool, width, and metrics .* another name$"):
        check_arguments(replace(ARGUMENTS, metric_labels=("width", "region", "pool")), FLAGS)


def test_a_kv_cache_with_heads_first_is_refused():
    check_arguments(ARGUMENTS, FLAGS)
    with pytest.raises(NotSupported, match=r"^SGLANG_USE_HND_KVCACHE=1 .*; set SGLANG_USE_HND_KVCACHE=0$"):
        check_arguments(replace(ARGUMENTS, heads_first=True), FLAGS)


@pytest.mark.parametrize(
    ("flag", "kept_by_layers", "kept"),
    [
        (None, (None, None), None),
        (None, (32, None), None),  # one layer attends to all tokens
        (None, (32, 32), 32),
        (None, (8, 8), 8),  # as long as the block
        (64, (None, None), 64),
        (64, (32, None), 64),
        (64, (32, 32), 32),
        (16, (32, 32), 16),
    ],
)
def test_the_draft_window_is_the_smallest_sufficient_one(flag, kept_by_layers, kept, draft):
    kinds = tuple(FULL if window is None else SLIDING for window in kept_by_layers)
    window = max((window for window in kept_by_layers if window is not None), default=None)
    draft = replace(draft, layer_types=kinds, sliding_window=window)
    assert combine(replace(ARGUMENTS, draft_window=flag), TARGET, draft, FLAGS).draft_window == kept


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mask_token_id": 128}, "mask_token_id 128 is outside the target's vocabulary of 128"),
        ({"target_layer_ids": (0, 3)}, "target_layer_ids end at 3"),  # the last layer's output cannot be captured
        ({"sliding_window": 4}, "sliding_window 4 is smaller than block_size 8"),
    ],
    ids=str,
)
def test_an_inconsistent_draft_is_refused(changes, sentence, draft):
    with pytest.raises(ValueError, match=sentence):
        combine(ARGUMENTS, TARGET, replace(draft, **changes), FLAGS)


def test_a_draft_may_omit_its_vocabulary(checkpoints, tmp_path):
    folder = checkpoints.write_draft(tmp_path, vocab_size=None)
    assert combine(ARGUMENTS, TARGET, checkpoint.read(str(folder)), FLAGS).draft.vocab_size is None


def test_arguments_are_checked_once_and_first(monkeypatch, draft):
    """Arguments are checked before any file of the draft or the target is opened or fetched."""
    order = list[str]()

    def noted(name: str, value: Any) -> Any:
        return lambda *_: order.append(name) or value

    monkeypatch.setattr(config, "arguments_of", noted("arguments", ARGUMENTS))
    monkeypatch.setattr(config, "check_arguments", noted("checked", None))
    monkeypatch.setattr(config.checkpoint, "read", noted("read", draft))
    monkeypatch.setattr(config, "target_of", noted("target", TARGET))
    assert config.DFlashConfig.from_server_args(object()).draft is draft
    assert order == ["arguments", "checked", "read", "target"]


@pytest.mark.parametrize("value", [0, 4, True, ["a"]])
def test_zero_counts_as_given(value):
    assert is_given(value)
    assert not any(map(is_given, (None, False, [])))


def test_refused_arguments_exist_in_sglang():
    known = {member for name in SECTIONS["served"] for member in name.members.split()}
    assert {*UNSUPPORTED, *IGNORED} <= known


def test_the_memory_saver_needs_a_copy_of_the_draft():
    check_arguments(replace(ARGUMENTS, memory_saver=True, backs_up_draft=True), FLAGS)
    check_arguments(replace(ARGUMENTS, backs_up_draft=True), FLAGS)
    sentence = r"^--enable-memory-saver without a copy .*; add --enable-draft-weights-cpu-backup, or --enable-w"
    with pytest.raises(NotSupported, match=sentence):
        check_arguments(replace(ARGUMENTS, memory_saver=True), FLAGS)


def test_outlines_is_refused():
    for backend in (None, "xgrammar", "llguidance", "none"):
        check_arguments(replace(ARGUMENTS, grammar_backend=backend), FLAGS)
    with pytest.raises(NotSupported, match=r"--grammar-backend outlines is not supported.*give xgrammar or llguidance"):
        check_arguments(replace(ARGUMENTS, grammar_backend="outlines"), FLAGS)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"device": "sm80"}, "needs an NVIDIA GPU of compute capability 8.9 or more, found sm80"),
        ({"device": "rocm"}, "found rocm"),
        ({"load_format": "flash_rl"}, "with --load-format flash_rl is not supported .*"),
    ],
)
def test_an_fp8_head_is_refused_where_unsupported(changes, sentence):
    check_arguments(replace(ARGUMENTS, **changes), FLAGS)
    with pytest.raises(NotSupported, match=f"^SGLANG_DFLASH_DRAFT_HEAD=fp8 .*{sentence}; set .*HEAD=full$"):
        check_arguments(replace(ARGUMENTS, **changes), FP8_HEAD)
    for device in ("cpu", "undecided", "sm89", "sm90", "sm100"):
        check_arguments(replace(ARGUMENTS, device=device), FP8_HEAD)


def test_features_need_requests_that_may_ask_for_them():
    features = flags.read({"SGLANG_DFLASH_HIDDEN_STATES": "features"})
    check_arguments(replace(ARGUMENTS, returns_hidden_states=True), features)
    with pytest.raises(ValueError, match=r"=features has no effect without --enable-return-hidden-states; add the"):
        check_arguments(ARGUMENTS, features)


GDN = {"recurrent": True, "gated_delta_net": True}
MAMBA2 = {"recurrent": True}
SHARED = {"attention_dp": True, "dp_lm_head": True}


def decided(draft: Checkpoint, target: dict[str, bool], arguments: dict[str, Any], **env: str) -> config.DFlashConfig:
    """Return the config with the environment flags `env`, named in lower case without the prefix SGLANG_DFLASH_."""
    read = flags.read({f"SGLANG_DFLASH_{name.upper()}": value for name, value in env.items()})
    return combine(replace(ARGUMENTS, **arguments), replace(TARGET, **target), draft, read)


PLAIN = {"widths": (1, 4, 8), "copy": Copy.AUTO, "gdn_state": None, "slots_are_ours": True}
DECODE, PREFILL = {"disaggregation": "decode"}, {"disaggregation": "prefill"}
# A prefill server only reads prompts.
READS = {"widths": (), "copy": Copy.OFF, "gdn_state": None, "slots_are_ours": False}


@pytest.mark.parametrize(
    ("target", "arguments", "env", "served"),
    [
        ({}, {}, {}, PLAIN),
        ({}, {}, {"copy": "random"}, PLAIN | {"copy": Copy.RANDOM}),
        ({}, {}, {"copy": "off"}, PLAIN | {"copy": Copy.OFF}),
        ({}, {"host_cache": True}, {}, PLAIN | {"slots_are_ours": False}),  # the host cache fills KV slots too
        ({}, SHARED, {}, PLAIN | {"widths": (8,)}),
        ({}, DECODE, {}, PLAIN | {"copy": Copy.OFF, "slots_are_ours": False}),
        ({}, PREFILL, {}, READS),
        (GDN, {}, {}, PLAIN | {"gdn_state": GdnState.FOLD}),
        (GDN, {}, {"gdn_state": "snapshot"}, PLAIN | {"gdn_state": GdnState.SNAPSHOT}),
        (GDN, DECODE, {}, PLAIN | {"gdn_state": GdnState.FOLD, "copy": Copy.OFF, "slots_are_ours": False}),
        (GDN, PREFILL, {}, READS),
        (MAMBA2, {}, {}, PLAIN | {"widths": (8,), "gdn_state": GdnState.SNAPSHOT}),
        (MAMBA2, PREFILL, {}, READS),
    ],
)
def test_widths_copies_and_states_follow_from_the_launch(draft, target, arguments, env, served):
    found = decided(draft, target, arguments, **env)
    assert {name: getattr(found, name) for name in served} == served
    assert found.widest == 8


@pytest.mark.parametrize(
    ("target", "arguments", "reason"),
    [
        (MAMBA2, {}, "SGLang locates the recurrent states of this target by the block size"),
        (GDN, SHARED, "attention data parallelism supports no other width"),
    ],
)
def test_narrow_widths_are_refused_before_weights_load(draft, target, arguments, reason):
    refusal = rf"^SGLANG_DFLASH_WIDTHS=4: this server .*\({reason}\); set the variable to 8, or unset it$"
    with pytest.raises(NotSupported, match=refusal):
        decided(draft, target, arguments, widths="4")
    assert decided(draft, target, arguments, widths="8").widths == (8,)
    assert decided(draft, target, arguments | {"disaggregation": "prefill"}, widths="4").widths == ()


def test_copies_may_widen_a_step_past_the_block(draft):
    assert decided(draft, {}, {}, widths="4,24").widest == 24
    with pytest.raises(NotSupported, match=r"24 exceeds the block of 8 .*: SGLANG_DFLASH_COPY=off\)"):
        decided(draft, {}, {}, widths="4,24", copy="off")
    with pytest.raises(NotSupported, match=r"24 exceeds the block of 8 .*: a prefill server does not decode\)"):
        decided(draft, {}, {"disaggregation": "prefill"}, widths="4,24")
