"""Speculative generation must return the target's own output, for dense, sliding and recurrent targets."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    FalconH1Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sglang_dflash.reference.torch import DecodedStep, DraftModel
from sglang_dflash.reference.torch.copies import Copies
from sglang_dflash.reference.torch.generate import Options, choose, draft_block, spec_steps
from sglang_dflash.reference.torch.target import TargetReader
from sglang_dflash.train.draft import draft_config_for
from sglang_dflash.train.start import initialised

VOCAB = 40
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def qwen3() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**COMMON))


def qwen3_sliding() -> Qwen3ForCausalLM:
    layers = ["full_attention", "sliding_attention"] * 2
    return Qwen3ForCausalLM(Qwen3Config(**COMMON, layer_types=layers, use_sliding_window=True, sliding_window=9))


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**COMMON))


def hybrid() -> Qwen3_5ForCausalLM:
    n_heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16} | n_heads
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, **sizes, rope_parameters=rope))


TARGETS = [qwen3, qwen3_sliding, llama, hybrid]


@pytest.fixture(params=TARGETS, ids=lambda make: make.__name__)
def target(request):
    torch.manual_seed(1)
    return request.param().eval().requires_grad_(False)


def plain_target(n: int = 20) -> tuple[Qwen3ForCausalLM, torch.Tensor, list[int]]:
    """Return a target, a prompt, and the `n` tokens that the target generates."""
    torch.manual_seed(1)
    target, input_ids = qwen3().eval().requires_grad_(False), prompt()
    return target, input_ids, target.generate(input_ids, max_new_tokens=n, do_sample=False)[0, 7:].tolist()


def make_draft(target) -> DraftModel:
    torch.manual_seed(2)
    config = draft_config_for(target, n_layers=2, block_size=6, mask_token_id=VOCAB - 1, target_layer_ids=(0, 1, 2))
    return initialised(DraftModel(config), std=0.3).eval().requires_grad_(False)


def prompt(length: int = 7) -> torch.Tensor:
    return torch.randint(0, VOCAB - 1, (1, length), generator=torch.Generator().manual_seed(3))


def steps_of(draft, target, input_ids, **options) -> list[DecodedStep]:
    return list(spec_steps(draft, target, input_ids, Options(**options)))


class Oracle:
    """Draft that guesses the target's continuation: `n_right[i]` right drafts in step i, then wrong ones."""

    def __init__(self, monkeypatch, continuation: list[int], n_right: list[int]) -> None:
        self.continuation, self.n_right, self.drafted = continuation, n_right, []
        monkeypatch.setattr("sglang_dflash.reference.torch.generate.draft_block", self.draft_block)

    def draft_block(self, draft, target, anchor, context, sizes):
        made = context.n_tokens - 7 + 1  # tokens committed before this step
        assert anchor.item() == self.continuation[made - 1]
        right = self.continuation[made : made + sizes[0] - 1]
        n_right = min(self.n_right[len(self.drafted) % len(self.n_right)], len(right))
        self.drafted.append(n_right)
        wrong = [(token + 1) % VOCAB for token in right[n_right:]]
        return torch.cat([anchor, anchor.new_tensor(right[:n_right] + wrong)])


def test_greedy_output_equals_the_targets(target):
    input_ids = prompt()
    want = target.generate(input_ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(make_draft(target).spec_generate(input_ids, target, 40), want)


def test_every_accepted_count_leaves_the_right_target_state(target, monkeypatch):
    """A random draft model's guesses are nearly never accepted. `Oracle` causes every accepted count from 0 to N-1."""
    input_ids = prompt()
    continuation = target.generate(input_ids, max_new_tokens=70, do_sample=False)[0, 7:].tolist()
    oracle = Oracle(monkeypatch, continuation, n_right=[0, 5, 1, 4, 2, 3])
    steps = steps_of(make_draft(target), target, input_ids, max_new_tokens=50)
    assert [token for step in steps for token in step.committed] == continuation[:50]
    assert [step.n_accepted for step in steps[1:]] == oracle.drafted
    assert set(oracle.drafted) == {0, 1, 2, 3, 4, 5}


def test_keeping_part_of_a_block_equals_reading_that_part(target):
    ids_1S = prompt(30)
    for n in range(1, 7):
        cut, plain = (TargetReader(target, (0, 1, 2)) for _ in range(2))
        cut.read(ids_1S[:, :17])
        _, undo = cut.read_block(ids_1S[:, 17:23])
        cut.keep(n, undo)
        plain.read(ids_1S[:, : 17 + n])
        for got, want in zip(cut.read(ids_1S[:, 23:]), plain.read(ids_1S[:, 23:]), strict=True):
            torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_features_are_the_outputs_of_the_named_layers(target):
    outputs = []
    for layer in target.model.layers:
        layer.register_forward_hook(lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    features = TargetReader(target, (0, 2)).read(prompt()).features_1SC
    assert torch.equal(features, torch.cat([outputs[0], outputs[2]], dim=-1))


def test_stop_token_and_length_end_the_output(target):
    draft, input_ids = make_draft(target), prompt()
    expected = target.generate(input_ids, max_new_tokens=12, do_sample=False)[0, 7:].tolist()
    stopped = draft.spec_generate(input_ids, target, 12, stop_token_ids=[expected[5]])[0, 7:].tolist()
    assert stopped == expected[: expected.index(expected[5]) + 1]
    for n in (1, 2, 7):
        assert draft.spec_generate(input_ids, target, n)[0, 7:].tolist() == expected[:n]


def test_the_first_stop_token_of_a_step_ends_the_output(monkeypatch):
    target, input_ids, expected = plain_target()
    first, later = expected[2], next(token for token in expected[3:6] if token != expected[2])
    assert not {first, later} & set(expected[:2])
    Oracle(monkeypatch, expected, n_right=[5])
    steps = steps_of(make_draft(target), target, input_ids, max_new_tokens=20, stop_token_ids=(first, later))
    assert steps == [DecodedStep(expected[:1], 0), DecodedStep(expected[1:3], 5)]


@pytest.mark.parametrize("width", [6, 9])
def test_copies_keep_the_output_and_extend_the_block(target, width, monkeypatch):
    verified = []

    class Watched(Copies):
        def copy(self, tokens_N):
            verified.append(tokens_N.tolist())
            return super().copy(tokens_N)

    monkeypatch.setattr("sglang_dflash.reference.torch.generate.Copies", Watched)
    input_ids = prompt().repeat(1, 5)
    want = target.generate(input_ids, max_new_tokens=40, do_sample=False)[0, 35:].tolist()
    steps = steps_of(make_draft(target), target, input_ids, max_new_tokens=40, copies=True, width=width)
    assert [token for step in steps for token in step.committed] == want
    # Before copying, slots after the block of 6 hold mask tokens.
    assert {tuple(block[6:]) for block in verified} == {(VOCAB - 1,) * (width - 6)}


def test_a_block_past_the_end_is_cut_but_counted_whole(monkeypatch):
    target, input_ids, expected = plain_target()
    Oracle(monkeypatch, expected, n_right=[5])
    steps = steps_of(make_draft(target), target, input_ids, max_new_tokens=4)
    assert steps == [DecodedStep(expected[:1], 0), DecodedStep(expected[1:4], 5)]


def test_width_verifies_a_prefix_of_the_whole_block(monkeypatch):
    target, input_ids, expected = plain_target(30)
    Oracle(monkeypatch, expected, n_right=[5])
    steps = steps_of(make_draft(target), target, input_ids, max_new_tokens=10, width=3)
    assert [len(step.committed) for step in steps] == [1, 3, 3, 3]


def test_width_one_is_plain_decoding(target):
    steps = steps_of(make_draft(target), target, prompt(), max_new_tokens=9, width=1)
    expected = target.generate(prompt(), max_new_tokens=9, do_sample=False)[0, 7:].tolist()
    assert [step.committed for step in steps] == [[token] for token in expected]


def test_the_draft_window_hides_older_context():
    target, *_ = plain_target()
    draft, anchor = make_draft(target), torch.tensor([5])
    features = torch.randn(1, 30, draft.config.feature_size)
    changed = features.clone()
    changed[:, :22] += 1.0
    near, far = (draft.context_kv(f) for f in (features, changed))
    windowed = [draft_block(draft, target, anchor, context, (6, 8)).tolist() for context in (near, far)]
    whole = [draft_block(draft, target, anchor, context, (6, None)).tolist() for context in (near, far)]
    assert windowed[0] == windowed[1]
    assert whole[0] != whole[1]


def test_sampled_output_has_the_distribution_of_the_target(monkeypatch):
    """The first two tokens have probability p(x1) p(x2 | x1), whatever is drafted, within five standard errors."""
    target, input_ids, _ = plain_target()
    with torch.no_grad():
        p1_V = torch.softmax(target(input_ids).logits[0, -1], -1)
        after_V1 = torch.cat([input_ids.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], dim=1)
        p2_VV = torch.softmax(target(after_V1).logits[:, -1], -1)
    favourite = p2_VV.argmax(-1)
    monkeypatch.setattr(
        "sglang_dflash.reference.torch.generate.draft_block",
        lambda draft, target, anchor, context, sizes: torch.cat([anchor, favourite[anchor]]),
    )
    generator, n = torch.Generator().manual_seed(4), 500
    options = {"max_new_tokens": 2, "temperature": 1.0, "block_size": 2, "generator": generator}
    draft, pairs, accepted = make_draft(target), Counter(), 0
    for _ in range(n):
        first, second = steps_of(draft, target, input_ids, **options)
        pairs[first.committed[0], second.committed[0]] += 1
        accepted += second.n_accepted
    expected = {(i, j): (p1_V[i] * p2_VV[i, j]).item() for i in range(VOCAB) for j in range(VOCAB)}
    likely = {pair: p for pair, p in expected.items() if n * p >= 5}
    assert len(likely) > 10
    for pair, p in likely.items():
        assert abs(pairs[pair] - n * p) < 5 * (n * p * (1 - p)) ** 0.5, pair
    # A draft is accepted as often as the target itself would generate it.
    p = sum(expected[i, favourite[i].item()] for i in range(VOCAB))
    assert abs(accepted - n * p) < 5 * (n * p * (1 - p)) ** 0.5


def test_temperature_zero_is_the_limit_of_small_temperatures():
    logits_NV = torch.randn(5, VOCAB)
    cold = Options(max_new_tokens=1, temperature=1e-4)
    assert torch.equal(choose(logits_NV, cold), choose(logits_NV, Options(max_new_tokens=1)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_new_tokens": 0}, "at least one token"),
        ({"max_new_tokens": 5, "temperature": -1.0}, "temperature of 0 or more"),
        ({"max_new_tokens": 5, "width": 7}, "width 7 exceeds the block of 6"),
        ({"max_new_tokens": 5, "draft_window": 3}, "draft_window 3 is smaller than the block"),
    ],
)
def test_invalid_options_are_refused(options, expected):
    target = qwen3()
    with pytest.raises(ValueError, match=expected):
        steps_of(make_draft(target), target, prompt(), **options)


@pytest.mark.parametrize("shape", [(2, 3), (1, 0), (4,)])
def test_several_prompts_are_refused(shape):
    target = qwen3()
    with pytest.raises(ValueError, match="give one prompt"):
        make_draft(target).spec_generate(torch.zeros(shape, dtype=torch.long), target, 3)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": 64}, "the draft: hidden_size 32 is not the target's 64 .Qwen3ForCausalLM."),
        ({"num_hidden_layers": 5}, "the draft: num_target_layers 4 is not the target's 5"),
    ],
)
def test_a_draft_of_another_target_is_refused(change, expected):
    other = Qwen3ForCausalLM(Qwen3Config(**(COMMON | change)))
    with pytest.raises(ValueError, match=expected):
        make_draft(qwen3()).spec_generate(prompt(), other, 3)


def test_features_of_the_last_layer_are_those_before_the_final_norm():
    target = qwen3()
    with torch.inference_mode():
        found = TargetReader(target, (1, 3)).read(prompt()).features_1SC
        states = target(prompt(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(found[..., : found.shape[-1] // 2], states[2])
    torch.testing.assert_close(target.model.norm(found[..., found.shape[-1] // 2 :]), states[4])


def test_a_layer_that_the_target_lacks_is_refused():
    target = qwen3()
    config = draft_config_for(target, n_layers=1, block_size=4, mask_token_id=0, target_layer_ids=(2,))
    with pytest.raises(ValueError, match=r"end at 4, and a target of 4 layers .* gives features of layers 0\.\.3"):
        DraftModel(replace(config, target_layer_ids=(4,))).spec_generate(prompt(), target, 3)


def test_a_target_with_irreversible_state_is_refused():
    both_in_one_layer = SimpleNamespace(config=FalconH1Config(num_hidden_layers=2))
    with pytest.raises(
        ValueError, match="its cache has layers of type LinearAttentionAndFullAttentionLayer; give a target"
    ):
        TargetReader(both_in_one_layer, (0,))


@pytest.mark.parametrize(
    ("options", "prefix_len", "n_seen"),
    [
        ({}, 100, 100),
        ({"n_unseen": 30}, 100, 70),
        ({"draft_window": 64}, 100, 64),
        ({"draft_window": 64}, 40, 40),
        ({"draft_window": 64, "n_unseen": 60}, 100, 40),
        ({"draft_window": 64, "page_size": 16}, 100, 68),  # position 36 is in the page that begins at 32
        ({"draft_window": 64, "page_size": 16, "n_unseen": 48}, 100, 52),
    ],
)
def test_the_window_of_context_tokens(options: dict, prefix_len: int, n_seen: int) -> None:
    assert Options(max_new_tokens=1, **options).window(prefix_len) == n_seen
