"""What is made of what was seen: each verdict can fall both ways."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.capacity import geometry
from sglang_dflash.prove import inside, machine, outside, served
from sglang_dflash.prove.machine import Gpu, Place
from sglang_dflash.prove.record import Failed
from sglang_dflash.prove.served import Launch
from sglang_dflash.tiny import pairs as tiny
from sglang_dflash.tiny.pairs import Arm

H200 = Gpu("NVIDIA H200", "sm90", 141 << 30)


def place(gpu: Gpu | None = None) -> Place:
    pairs = {machine.HYBRID: tiny.HYBRID, machine.DENSE: tiny.DENSE}
    return Place(gpu, "sm90", pairs, (), True, Path("logs"), 31600)


def draft_rows(*changed: int, captured: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    rows = [{"requests": i + 1, "width": 16, "steps": 4, "served": 3, "changed": n} for i, n in enumerate(changed)]
    return {"captured": list(captured), "drafts": rows}


def test_drafts_that_stay() -> None:
    assert inside.judge_drafts(draft_rows(0, 0)).text == "no draft changed in 8 steps of 1 to 2 requests, widths 16"


def test_drafts_that_change_are_named_by_size() -> None:
    with pytest.raises(Failed, match=r"1 of 2 sizes .* most with 2 requests at width 16: 7 in 4 steps") as failed:
        inside.judge_drafts(draft_rows(0, 7))
    assert failed.value.numbers["drafts"][1]["changed"] == 7


def test_drafts_without_a_graph_prove_nothing() -> None:
    with pytest.raises(Failed, match="no graph"):
        inside.judge_drafts(draft_rows(0, captured=()))


def padded(n: int = 16, bad: int = 0, real: int = 0, target: int = 0, draft: int = 0) -> dict[str, Any]:
    row = {"requests": 3, "width": 16, "steps": 1, "padded": n, "not_finite": bad, "not_finite_real": real}
    return {"rows": [row], "padding_slot": {"target": target, "draft": draft}}


def test_padding_that_is_finite() -> None:
    assert inside.judge_padding(padded()).text.startswith("16 padded rows: 0 values")


@pytest.mark.parametrize("seen", [{"n": 0}, {"bad": 1}, {"real": 1}, {"target": 1}, {"draft": 1}])
def test_padding_that_is_not(seen: dict[str, int]) -> None:
    with pytest.raises(Failed):
        inside.judge_padding(padded(**seen))


def test_steps_of_one_token_may_cost_a_tenth_more_than_decoding() -> None:
    assert outside.judge_one_token(2.0, 2.19).text == "2.190 ms a token, 2.000 without speculation: 1.09 times"
    with pytest.raises(Failed, match=r"1\.11 times"):
        outside.judge_one_token(2.0, 2.22)


PROMPTS = [[1, 2], [3]]
SAID = [[5, 6, 7], [8, 9]]
SWAPPED = [[5, 6, 4], [8, 9]]


def said(ours: list[list[int]], stock: list[list[int]] = SAID) -> dict[Arm, dict[int, list[list[int]]]]:
    return {Arm.OFF: {1: SAID}, Arm.STOCK: {1: stock}, Arm.PLUGIN: {1: ours}}


def parity(where: Place, gap: float, answers: dict[Arm, dict[int, list[list[int]]]]) -> str:
    asked = []

    def gap_of(text: Any, token: int) -> float:
        asked.append((list(text), token))
        return gap

    found = outside.judge_parity(where, Launch("hybrid", "fa3"), PROMPTS, answers, gap_of)
    assert asked in ([], [([1, 2, 5, 6], 4)])
    return found.text


def test_answers_that_are_equal() -> None:
    assert parity(place(), 0.0, said(SAID)).endswith("off 2 of 2, stock 2 of 2, plugin 2 of 2")


def test_on_a_gpu_a_tie_is_excused_and_more_is_not() -> None:
    assert parity(place(H200), 0.2, said(SWAPPED)).endswith("plugin 1 of 2")
    with pytest.raises(Failed, match="plugin with 1 at once: prompt 0, token 2: expected 7, found 4"):
        parity(place(H200), 0.4, said(SWAPPED))


def test_in_fp32_on_a_cpu_nothing_is_excused() -> None:
    with pytest.raises(Failed):
        parity(place(), 1e-3, said(SWAPPED))


def test_of_sglangs_worker_it_is_told() -> None:
    assert "stock 1 of 2 (1 beyond a tie)" in parity(place(H200), 4.0, said(SAID, stock=SWAPPED))


def test_an_answer_that_ends_early_is_no_tie() -> None:
    parted = served.apart(PROMPTS, SAID, [[5, 6], [8, 9]], lambda text, token: 0.0)
    assert [one.gap for one in parted] == [float("inf")]


def test_tokens_per_step() -> None:
    assert served.committed_per_step([{0: 1, 4: 1}, {2: 2}]) == 1 + 8 / 4
    assert served.committed_per_step([]) != served.committed_per_step([])  # of nothing: nan


def watched_bytes(kv_itemsize: int) -> served.Watched:
    """A server of the hybrid pair: 100 tokens in pages of one, 4 states, 2 requests and a row of padding."""
    target, draft = geometry.read_target(str(tiny.HYBRID.target)), geometry.read_draft(str(tiny.HYBRID.draft))
    wide = [replace(one.attention, itemsize=kv_itemsize).bytes_per_token(1) for one in (target, draft)]
    recurrent = replace(target.recurrent, conv_itemsize=4)
    pools = {
        "target_tokens": 100,
        "target_kv": 101 * wide[0],
        "draft_kv": 101 * wide[1],
        "page_size": 1,
        "requests": 2,
        "states": 4,
        "state_bytes": 4 * recurrent.state_bytes,
        "block_rows": 3,
        "block_bytes": 3 * recurrent.record_bytes(16),
    }
    dflash = {"block_size": 16, "widest": 16, "copies": [], "probe": {"bytes": pools}}
    info = {"tp_size": 1, "mem_fraction_static": 0.8, "page_size": 1, "speculative_draft_window_size": None}
    return served.Watched(Launch("hybrid", "fa3"), PROMPTS, {}, dflash, info)


def test_pools_that_take_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "whole_blocks", lambda _: watched_bytes(4))
    assert "(+0.0%)" in inside.memory(place()).text
    monkeypatch.setattr(inside, "whole_blocks", lambda _: watched_bytes(2))
    with pytest.raises(Failed, match=r"target kv .* \(-50.0%\)"):
        inside.memory(place())


def test_tokens_of_a_card_are_counted_for_a_pair_of_ones_own() -> None:
    own = Place(H200, "sm90", {machine.OWN: tiny.HYBRID}, (), True, Path("logs"), 31600)
    watched = watched_bytes(2)._replace(launch=Launch(machine.OWN, "fa3"))
    assert inside.counted_tokens(H200, watched, own) > 1_000_000
