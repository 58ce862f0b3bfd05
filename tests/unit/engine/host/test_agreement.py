"""Comparison of ranks: the sentence about a difference, the facts that are compared, and the exchange of two ranks."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash import __version__, flags
from sglang_dflash.engine.host import agreement
from sglang_dflash.engine.host.arguments import Arguments
from sglang_dflash.pairs.servers.ports import HOST, free_port

A, B = ("a", "1", "cure of a"), ("b", "2", "cure of b")
OTHER_A, OTHER_B = ("a", "3", "cure of a"), ("b", "4", "cure of b")


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ([[A, B], [A, B], [A, B]], ""),
        ([[A, B]], ""),
        ([[A, B], [A, B], [A, OTHER_B]], "b is 2 on rank 0 and 4 on rank 2; cure of b"),
        ([[A, B], [OTHER_A, OTHER_B]], "a is 1 on rank 0 and 3 on rank 1; cure of a"),
        ([[A], [A, B], [A]], ""),  # as with a draft from the hub on rank 1 and from folders on the others
        ([[A], [A, B], [A, OTHER_B]], "b is 2 on rank 1 and 4 on rank 2; cure of b"),
        ([[A, B], [OTHER_A]], "a is 1 on rank 0 and 3 on rank 1; cure of a"),
    ],
)
def test_the_first_difference_is_named(ranks: list[list[agreement.Fact]], sentence: str) -> None:
    assert agreement.difference(ranks) == sentence


# -- facts of a rank -----------------------------------------------------------------------------------------------


@pytest.fixture
def facts(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns name -> value of the facts with the environment `env`."""

    def of(block_size: int = 8, widths: str = "1, 8", draft: str = pair["draft"], **env: str) -> dict[str, str]:
        monkeypatch.setattr(agreement.os, "environ", env)
        monkeypatch.setattr(flags, "current", lambda: flags.read(env))
        arguments: Arguments = SimpleNamespace(require_draft_path=lambda: draft, draft_revision=None)  # type: ignore[assignment]
        found = agreement.facts(arguments, {"the block size": block_size, "the verify widths": widths})
        assert len({name for name, _, _ in found}) == len(found)
        return {name: value for name, value, _ in found}

    return of


def test_every_variable_is_compared_except_the_trace_and_those_without_effect(facts: Any) -> None:
    with_effect = {flag.name for flag in flags.FLAGS} - {
        "SGLANG_DFLASH_WIDTH_TRACE", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    }  # fmt: skip
    plain = facts()
    assert {name for name in plain if name.startswith("SGLANG_")} == with_effect
    for flag in flags.FLAGS:
        other = next((value for value in flag.values if value != flag.default), flag.example)
        if flag.name != "SGLANG_DFLASH_WORKER":
            changed = {name for name, value in facts(**{flag.name: other}).items() if value != plain[name]}
            assert changed == {flag.name} & with_effect


def test_version_choices_and_draft_are_compared(facts: Any, pair: dict[str, str], checkpoints: Any, tmp_path: Path):
    plain = facts()
    assert plain["sglang-dflash"] == __version__
    assert plain.items() - facts(block_size=4).items() == {("the block size", "8")}
    assert plain.items() - facts(widths="8").items() == {("the verify widths", "1, 8")}
    other = str(checkpoints.write_draft(tmp_path / "draft", rms_norm_eps=1e-5))
    assert {name for name, _ in plain.items() - facts(draft=other).items()} == {"the digest of the draft's files"}


def test_sglangs_worker_compares_only_itself(facts: Any) -> None:
    assert facts(SGLANG_DFLASH_WORKER="Stock", SGLANG_DFLASH_COPY="off") == {"SGLANG_DFLASH_WORKER": "stock"}


# -- exchange ------------------------------------------------------------------------------------------------------


def on_rank(rank: int, port: int, own: list[agreement.Fact] | None) -> str:
    """Compare this process, one of two ranks; return the error's text. With None the rank does not take part."""
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=2)
    agreement.get_tp_group = lambda: SimpleNamespace(ranks=[0, 1])
    agreement.arguments_of = lambda server_args: SimpleNamespace(tp_size=2)
    agreement.facts = lambda arguments, choices: own
    try:
        if own is not None:
            agreement.require_equal(None, {})
    except (ValueError, agreement.HostMismatch) as error:
        return str(error)
    return ""


def compared(*ranks: list[agreement.Fact] | None) -> list[str]:
    """Return the errors of two ranks. The processes are forked, so that they need not import SGLang again."""
    port = free_port(31900)
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as processes:
        started = [processes.submit(on_rank, rank, port, own) for rank, own in enumerate(ranks)]
        return [one.result() for one in started]


def test_equal_ranks_go_on() -> None:
    assert compared([A, B], [A, B]) == ["", ""]


def test_all_ranks_end_with_the_same_sentence() -> None:
    assert compared([A, B], [A, OTHER_B]) == ["b is 2 on rank 0 and 4 on rank 1; cure of b"] * 2


def test_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "WAIT_S", 1.0)
    error, nothing = compared([A], None)
    assert nothing == ""
    assert error.startswith("not all 2 ranks of the model compared their settings within 1 s; install sglang-dflash ")


def test_one_rank_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "arguments_of", lambda server_args: SimpleNamespace(tp_size=1))
    monkeypatch.delattr(agreement, "gathered")
    agreement.require_equal(None, {})
