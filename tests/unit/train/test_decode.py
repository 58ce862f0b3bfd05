"""Decoding in fixed shapes: equal to Transformers' `generate`, and a step that a CUDA graph can capture."""

from contextlib import nullcontext
from random import Random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_dflash.pairs.tiny.pairs import DENSE
from sglang_dflash.platforms.rehearsal import graph
from sglang_dflash.platforms.rehearsal.tape import CaptureError
from sglang_dflash.train import writer
from sglang_dflash.train.decode import LOOK_EVERY, Decoder, grouped
from sglang_dflash.train.writer import Asked, GenerateWriter, StaticWriter, Writer, obstacle, writer_for
from tests.unit.reference.torch.test_generate import VOCAB, hybrid, llama, qwen3, qwen3_sliding

END = 2


@pytest.fixture(scope="module")
def dense() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DENSE.target, dtype=torch.float32).eval()


def prompts(*lengths: int, vocabulary: int = 1000) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def written(by: Writer, asked: Asked) -> list[tuple[list[int], bool]]:
    """Return the continuations in the order of the prompts."""
    found = sorted(by.write(asked, Random(0)))
    assert [row.prompt for row in found] == list(range(len(asked.prompts)))
    return [(row.ids, row.stopped) for row in found]


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_greedy_answers_equal_those_of_generate(dense, at_once):
    asked = prompts(3, 17, 1, 40, 9, 2, 30)
    for stop_ids in ((END,), (END, 5), ()):
        request = Asked(asked, [0.0] * 7, 40, stop_ids)
        found = written(StaticWriter(dense, at_once), request)
        assert found == written(GenerateWriter(dense, 1, ""), request)
        assert {stopped for _, stopped in found} == ({True, False} if stop_ids else {False})


@pytest.mark.parametrize("limit", [1, 2, LOOK_EVERY, LOOK_EVERY + 1])
def test_the_limit_holds(dense, limit):
    request = Asked(prompts(3, 8), [0.0, 0.0], limit, ())
    found = written(StaticWriter(dense, 2), request)
    assert found == written(GenerateWriter(dense, 2, ""), request)
    assert [len(ids) for ids, _ in found] == [limit, limit]


def test_heads_of_a_group_and_other_dtypes_are_kept():
    """Two query heads read each key/value head. In bf16, keys, values and logits are bf16."""
    torch.manual_seed(0)
    for target in (qwen3(), llama()):
        request = Asked(prompts(5, 2, 11, vocabulary=VOCAB), [0.0] * 3, 30, ())
        target = target.eval()
        assert written(StaticWriter(target, 3), request) == written(GenerateWriter(target, 1, ""), request)
        assert all(len(ids) == 30 for ids, _ in written(StaticWriter(target.bfloat16(), 3), request))


def test_a_batch_mixes_temperatures(dense):
    """Greedy rows are the same in every mix. Sampled rows depend on the seed and end at a stop token."""
    asked, runs = prompts(6, 12, 7, 9), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(written(StaticWriter(dense, 4), Asked(asked, [0.0, 1.5, 0.0, 1.5], 40, (END,))))
    assert runs[0] == runs[1]
    assert [a == b for a, b in zip(runs[0], runs[2], strict=True)] == [True, False, True, False]
    greedy = written(GenerateWriter(dense, 1, ""), Asked(asked, [0.0] * 4, 40, (END,)))
    assert [runs[0][i] for i in (0, 2)] == [greedy[i] for i in (0, 2)]
    assert all(END not in ids and (stopped or len(ids) == 40) for run in runs for ids, stopped in run)


def test_sampled_answers_have_stop_tokens(dense):
    """Every second token is a stop token. So most answers end early, before their stop token."""
    torch.manual_seed(0)
    stop_ids = tuple(range(0, 1024, 2))
    found = written(StaticWriter(dense, 16), Asked(prompts(*[8] * 16), [2.0] * 16, 20, stop_ids))
    assert sum(stopped for _, stopped in found) > 12
    assert not any(token in stop_ids for ids, _ in found for token in ids)


@torch.inference_mode()
def test_samples_follow_the_softmax(dense):
    decoder = Decoder(dense, 4000, 128, ())
    decoder.temperature_B1.fill_(0.5)
    decoder.noise_B1.fill_(1.0)
    torch.manual_seed(0)
    logits_V = torch.tensor([0.3, -0.2, 1.0, 0.0])
    counts = decoder.choose(logits_V.expand(4000, 4)).bincount(minlength=4)
    assert torch.allclose(counts / 4000, (logits_V / 0.5).softmax(-1), atol=0.03)


@torch.inference_mode()
def test_every_token_of_a_prompt_attends_to_a_slot(dense):
    """Else a softmax over nothing could be NaN, and NaN in a masked value spreads."""
    decoder = Decoder(dense, 2, 128, ())
    decoder.start_B.copy_(torch.tensor([0, 3]))
    mask_BLS = decoder.prompt_mask(5)[:, 0]
    assert mask_BLS.any(-1).all()
    assert mask_BLS[1, :, :5].int().tolist() == [
        [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip


def test_a_decoder_writes_several_batches(dense):
    """The second batch has fewer and shorter prompts, and the third is the first again."""
    decoder = Decoder(dense, 3, 128, (END,))
    first, second = prompts(20, 4, 9), prompts(2, 5)
    want = [decoder.write(first, [0.0] * 3, 30), Decoder(dense, 3, 128, (END,)).write(second, [0.0] * 2, 30)]
    assert [decoder.write(second, [0.0] * 2, 30), decoder.write(first, [0.0] * 3, 30)] == want[::-1]


def test_the_host_looks_at_finished_rows_every_16_steps(dense, monkeypatch):
    """All rows stop at their first token. So the decoder stops at its first look."""
    decoder, steps = Decoder(dense, 2, 128, tuple(range(1024))), []
    monkeypatch.setattr(decoder, "step", lambda: steps.append(decoder.append(torch.zeros(2, dtype=torch.int64))))
    assert [len(ids) for ids in decoder.write(prompts(3, 4), [0.0, 0.0], 100)] == [1, 1]
    assert len(steps) == LOOK_EVERY - 1


@pytest.fixture
def emulated(monkeypatch) -> None:
    """Replace `torch.cuda`'s graphs by those of the GPU emulation, and its streams by nothing."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    names = {"CUDAGraph": graph.Graph, "graph": graph.graph, "device": nullcontext, "stream": nullcontext}
    for name, value in (names | {"Stream": lambda: stream, "current_stream": lambda: stream}).items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.usefixtures("emulated")
def test_a_captured_step_replays(dense, heat):
    """The GPU emulation captures the step, refuses reads on the host, and replays it without its Python code.

    The graph is replayed for a second batch too, so all tensors of the step stay at their addresses.
    """
    decoder = Decoder(dense, 3, 128, (END,))
    batches = [(prompts(9, 4, 15), [heat] * 3), (prompts(3, 8), [heat, 0.0])]
    want = []
    torch.manual_seed(0)
    for batch in batches:
        want.append(decoder.write(*batch, 20))
    with torch.inference_mode():
        decoder.graph = decoder.captured()
    decoder.step = None
    torch.manual_seed(0)
    assert [decoder.write(*batch, 20) for batch in batches] == want


def test_a_read_on_the_host_cannot_be_captured(dense, monkeypatch):
    decoder = Decoder(dense, 2, 128, (END,))
    monkeypatch.setattr(decoder, "choose", lambda logits_BV: logits_BV.argmax(-1) + int(decoder.slot_1))
    with torch.inference_mode(), grouped(dense):
        decoder.start([], [])
        with pytest.raises(CaptureError), graph.graph(graph.Graph()):
            decoder.step()


def test_the_attention_of_the_target_is_restored(dense, monkeypatch):
    """Also after an error, such as a lack of memory."""
    found, before = [], dense.config._attn_implementation
    decoder = Decoder(dense, 1, 128, ())
    monkeypatch.setattr(decoder, "choose", lambda logits_BV: found.append(dense.config._attn_implementation) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder.write([[1]], [0.0], 4)
    assert found == ["grouped_decode"]
    assert dense.config._attn_implementation == before


def test_other_layers_keep_generate():
    torch.manual_seed(0)
    assert obstacle(qwen3()) == obstacle(llama()) == ""
    for make, reason in ((hybrid, "LinearAttentionLayer"), (qwen3_sliding, "DynamicSlidingWindowLayer")):
        by = writer_for(make().eval(), 2)
        assert isinstance(by, GenerateWriter)
        assert reason in by.name
        found = written(by, Asked(prompts(3, 5, 4, vocabulary=VOCAB), [0.0] * 3, 6, ()))
        assert {len(ids) for ids, _ in found} == {6}
    eager, scaled, expert = qwen3(), qwen3(), qwen3()
    eager.set_attn_implementation("eager")
    scaled.config.rope_parameters = {"rope_type": "longrope"}
    expert.config.num_experts = 8
    for target, reason in ((eager, "eager"), (scaled, "longrope"), (expert, "experts")):
        assert reason in obstacle(target)


def test_batches_are_bounded(dense, monkeypatch):
    """Rows of a batch have similar lengths. Their cache has at most `CACHE_SLOTS` slots, or one row."""
    monkeypatch.setattr(writer, "CACHE_SLOTS", 1024)
    lengths = [5, 900, 20, 60, 2000, 7, 70, 6, 300]
    found = StaticWriter(dense, 4).batches(lengths, 64)
    assert found == {(1, 2176): [[4]], (1, 1024): [[1]], (2, 384): [[8, 6]], (4, 128): [[3, 2, 5, 7]], (1, 128): [[0]]}
