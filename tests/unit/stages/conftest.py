"""Stages without SGLang's process groups."""

import pytest


@pytest.fixture(autouse=True)
def one_group_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attention data parallelism."""
    monkeypatch.setattr("sglang_dflash.stages.ranks.meet", lambda: False)


@pytest.fixture(autouse=True)
def prompts_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prefill/decode disaggregation."""
    monkeypatch.setattr("sglang_dflash.stages.state.prompts_only", lambda: False)
