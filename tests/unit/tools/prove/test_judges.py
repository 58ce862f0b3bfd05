"""Verdicts of `sglang-dflash prove`: each check must pass on good records and fail on bad ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from sglang_dflash.pairs.servers.server import Generation
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Arm
from sglang_dflash.tools.capacity import geometry
from sglang_dflash.tools.prove import draft_graph, inside, outside, served
from sglang_dflash.tools.prove.draft_graph import Shapes, forward, judge, make
from sglang_dflash.tools.prove.machine import Gpu, Place
from sglang_dflash.tools.prove.plugin import Finding
from sglang_dflash.tools.prove.served import Reference, Watched
from tests.unit.engine.draft.test_second import Products

H200 = Gpu("NVIDIA H200", "sm90", 141 << 30)


def place(gpu: Gpu | None = None, **changes: Any) -> Place:
    return replace(Place(gpu, "sm90", tiny.HYBRID, False, (), True, Path("logs"), 31600), **changes)


def finding(check: Callable[..., None], *args: Any) -> Finding:
    """Call a check outside pytest, and return its finding."""
    found = list[Finding]()
    check(*args, found.append)
    return found[0]


def record(slot: tuple[int, int] = (0, 0), captured: tuple[int, ...] = (1, 2), **second: int) -> Watched:
    """Return the record of a server whose probe saw four steps with one request and four with two.

    Args:
        slot: numbers of non-finite values in the padding KV slots of target and draft.
        captured: batch sizes of captured graphs.
        second: fields to replace in the row of steps with two requests.
    """
    row = {"width": 16, "steps": 4, "served": 3, "changed": 0, "padded": 8, "not_finite": 0, "not_finite_real": 0}
    steps = [row | {"requests": 1}, row | {"requests": 2} | second]
    slots = dict(zip(("target", "draft"), slot, strict=True))
    return Watched([], {}, {"probe": {"captured": list(captured), "steps": steps, "padding_slot": slots}}, {})


def test_changed_drafts_fail_and_are_named_by_size():
    good, bad = finding(inside.check_drafts, record()), finding(inside.check_drafts, record(changed=7))
    assert (good.text, good.holds) == ("no draft changed in 8 steps of 1 to 2 requests, widths 16", True)
    assert not bad.holds
    assert "1 of 2 sizes" in bad.text
    assert bad.text.endswith("most with 2 requests at width 16: 7 tokens in 4 steps")
    assert not finding(inside.check_drafts, record(captured=())).holds, "without a graph"


def test_finite_padding_holds():
    found = finding(inside.check_padding, record())
    assert found.holds
    assert found.text.startswith("values that are not finite: 0 in 16 padded rows")


@pytest.mark.parametrize("seen", [{"not_finite": 1}, {"not_finite_real": 1}, {"slot": (1, 0)}, {"slot": (0, 1)}])
def test_other_padding_does_not_hold(seen: dict[str, Any]) -> None:
    assert not finding(inside.check_padding, record(**seen)).holds


def test_without_padding_the_check_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="no batch was padded"):
        finding(inside.check_padding, record(padded=-8))


def test_the_time_of_a_token_leaves_out_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    class Timed:
        """Server with a prefill of 5 s and 2 ms per token. Answers end at the requested length or at `longest`."""

        longest = 1000

        def flush_cache(self) -> None:
            nonlocal clock
            clock += 30

        def generate(self, prompt: list[int], *, max_new_tokens: int, ignore_eos: bool) -> Generation:
            nonlocal clock
            assert ignore_eos
            clock += 5 + 0.002 * max_new_tokens
            return Generation([7] * min(max_new_tokens, self.longest), "", {})

    monkeypatch.setattr(outside, "perf_counter", lambda: clock)
    server = Timed()
    assert outside.token_ms(cast(Any, server), [1, 2]) == pytest.approx(2.0)
    server.longest = 200
    with pytest.raises(AssertionError, match="200 tokens instead of 272; raise --context-length"):
        outside.token_ms(cast(Any, server), [1, 2])


def test_step_of_one_token_may_cost_a_tenth_more() -> None:
    found = outside.judge_one_token(2.0, 2.19)
    assert (found.text, found.holds) == ("2.190 ms a token, 2.000 without speculation: 1.09 times", True)
    assert not outside.judge_one_token(2.0, 2.22).holds


PROMPTS = [[1, 2], [3]]
ANSWERS = [[5, 6, 7], [8, 9]]
SWAPPED = [[5, 6, 4], [8, 9]]


def reference(nats: float, **more: Any) -> Reference:
    """Return a reference with the answers `ANSWERS`. After 5 and 6, token 4 is less likely than 7 by `nats`."""

    def likeliest(context: Any) -> dict[int, float]:
        assert list(context) == [1, 2, 5, 6]
        return {7: -0.1, 4: -0.1 - nats}

    return Reference(ANSWERS, likeliest, **more)


def parity(where: Place, nats: float, ours: list[list[int]], stock: list[list[int]] = ANSWERS) -> Finding:
    answers = {Arm.OFF: {1: ANSWERS}, Arm.STOCK: {1: stock}, Arm.PLUGIN: {1: ours}}
    return outside.judge_parity(served.near_tie(where), PROMPTS, answers, reference(nats))


@pytest.mark.parametrize(
    ("where", "nats", "ours", "stock", "holds", "text"),
    [
        (place(), 0.0, ANSWERS, ANSWERS, True, "off 2 of 2, stock 2 of 2, plugin 2 of 2"),
        (place(H200), 0.2, SWAPPED, ANSWERS, True, "plugin 1 of 2"),
        (
            place(H200),
            0.4,
            SWAPPED,
            ANSWERS,
            False,
            "plugin with 1 at once: prompt 1, token 3: expected 7, found 4 (0.4",
        ),
        (place(), 1e-3, SWAPPED, ANSWERS, False, ""),
        (place(H200), 4.0, ANSWERS, SWAPPED, True, "stock 1 of 2 (1 beyond a tie)"),
    ],
    ids=["equal", "a near tie", "beyond a tie", "no near ties in fp32 on a CPU", "SGLang's worker cannot fail"],
)
def test_parity(where, nats, ours, stock, holds, text):
    found = parity(where, nats, ours, stock)
    assert found.holds is holds
    assert text in found.text


def test_only_bf16_has_near_ties() -> None:
    assert [served.near_tie(where) for where in (place(), place(H200), place(is_own=True))] == [0.0, 0.3, 0.3]


def test_answer_that_ends_early_is_no_near_tie() -> None:
    assert served.compare(PROMPTS, reference(0.0), [[5, 6], [8, 9]], 0.3).beyond_a_tie


def watched(answers: list[list[int]], histogram: tuple[int, ...] = ()) -> Watched:
    generations = [Generation(answer, "", {"spec_correct_drafts_histogram": histogram}) for answer in answers]
    return Watched(PROMPTS, {1: generations}, {}, {})


def test_answers_are_compared_with_plain_torch() -> None:
    assert finding(inside.check_answers, place(), watched(ANSWERS), reference(0.0)).text == "2 of 2 with 1 at once"
    assert finding(inside.check_answers, place(H200), watched(SWAPPED), reference(0.2)).holds
    assert not finding(inside.check_answers, place(), watched(SWAPPED), reference(0.2)).holds


@pytest.mark.parametrize(
    ("where", "histogram", "holds"),
    [
        (place(), (0, 0, 3), True),
        (place(), (0, 0, 2), False),
        (place(H200), (1, 0, 9), True),
        (place(H200), (1, 0, 1), False),
    ],
)
def test_steps_are_compared_with_plain_torch(where: Place, histogram: tuple[int, ...], holds: bool) -> None:
    """In the emulation steps must equal the reference's. On a GPU the acceptance length may differ by 10 %."""
    plain = reference(0.0, histograms=[{2: 3}, {2: 3}])
    found = finding(inside.check_steps, where, watched(ANSWERS, histogram), plain)
    assert found.holds is holds
    assert found.numbers["plain_torch"] == 3.0


def test_acceptance_length_has_the_bonus() -> None:
    assert served.acceptance_length([{0: 1, 4: 1}, {2: 2}]) == 1 + 8 / 4
    assert served.acceptance_length([]) != served.acceptance_length([])  # without steps it is nan


def watched_bytes(kv_itemsize: int) -> Watched:
    """Return the record of a server: 100 KV tokens in pages of one, 4 recurrent states, block records of 2 requests.

    KV pools have one more page, and block records one more row, for padding.
    """
    target, draft = geometry.read_target(str(tiny.HYBRID.target)), geometry.read_draft(str(tiny.HYBRID.draft))
    wide = [replace(one.attention, itemsize=kv_itemsize).bytes_per_token(1) for one in (target, draft)]
    recurrent = replace(target.recurrent, conv_itemsize=4)
    pools = {
        "target_tokens": 100, "target_kv": 101 * wide[0], "draft_kv": 101 * wide[1], "page_size": 1, "requests": 2,
        "states": 4, "state_bytes": 4 * recurrent.state_bytes,
        "block_rows": 3, "block_bytes": 3 * recurrent.record_bytes(16),
    }  # fmt: skip
    dflash = {"block_size": 16, "widest": 16, "copies": [], "probe": {"bytes": pools}}
    info = {"tp_size": 1, "mem_fraction_static": 0.8, "page_size": 1, "speculative_draft_window_size": None}
    return Watched(PROMPTS, {}, dflash, info)


def test_pools_are_compared_with_their_formulas() -> None:
    right, half = (finding(inside.check_memory, place(), watched_bytes(itemsize)) for itemsize in (4, 2))
    assert right.holds
    assert "(+0.0%)" in right.text
    assert not half.holds
    assert "(-50.0%)" in half.text


def test_tokens_of_a_card_are_counted_for_a_given_pair() -> None:
    own = place(H200, is_own=True)
    assert inside.counted_tokens(H200, own, watched_bytes(2)) > 1_000_000


SMALL = Shapes(n_layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=12, n_vocab=20, block=4)


def test_forward_multiplies_by_each_weight_once() -> None:
    weights = make(SMALL, "cpu", torch.float32)
    with Products() as products:
        tokens_BN = forward(weights, 3, SMALL.block)()
    assert tokens_BN.shape == (3, SMALL.block)
    assert [name for name, _ in products.seen] == ["aten::mm"] * (4 * SMALL.n_layers + 1)
    assert products.seen[-1][1] == [(3 * (SMALL.block - 1), SMALL.hidden), (SMALL.hidden, SMALL.n_vocab)]


def test_default_shapes_have_the_bytes_of_the_27b_draft() -> None:
    """The layers have 3.2 GB in bf16, the head 2.5 GB."""
    *layers, head = [2 * n * m for n, m in Shapes().weights]
    assert sum(layers) == pytest.approx(3.2e9, rel=0.01)
    assert head == pytest.approx(2.5e9, rel=0.02)


def test_head_read_once_per_request_fails() -> None:
    good, bad = judge({1: 1.4, 8: 1.5, 32: 4.5}), judge({1: 1.4, 8: 5.7, 32: 22.0})
    assert (good.text, good.holds) == ("1.40 / 1.50 / 4.50 ms for 1, 8, 32 requests", True)
    assert not bad.holds
    assert draft_graph.BATCHES == (1, 8, 32)
