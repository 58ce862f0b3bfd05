"""The state that a running server reports at `GET /server_info`."""

from collections.abc import Callable

import pytest

from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.tools.check import served
from tests.server.lib.variants import VARIANTS

MAX_NEW_TOKENS = 48


def test_steps_are_counted(whole: Server, questions: Callable) -> None:
    before = served.fetch(whole.url)["width"]
    answers = whole.generate_many(questions(4), concurrency=1, max_new_tokens=MAX_NEW_TOKENS)
    after = served.fetch(whole.url)["width"]
    assert (after["policy"], after["seconds"]) == ("always 16", {})
    assert set(after["n_steps"]) == {"16"}
    n_steps = after["n_steps"]["16"] - before["n_steps"].get("16", 0)
    # The step that already runs when the last step of an answer is read is not counted.
    assert n_steps == sum(answer.meta["spec_verify_ct"] for answer in answers)
    assert after["committed"] - before["committed"] >= sum(len(answer.token_ids) - 1 for answer in answers)


@pytest.mark.full
def test_step_times_and_chosen_widths_are_reported(server: Callable, questions: Callable) -> None:
    variant = VARIANTS["hybrid-chosen-widths"]
    ours = server(flags=variant.flags, env=dict(variant.env))
    ours.generate_many(questions(8), concurrency=4, max_new_tokens=MAX_NEW_TOKENS)
    dflash = served.fetch(ours.url)
    width = dflash["width"]
    widths = ["1", "4", "8", "12", "16"]
    assert (width["policy"], dflash["block_size"]) == ("auto", 16)
    assert list(width["seconds"]) == ["1", "2", "4", "8"]
    for by_width in width["seconds"].values():
        assert list(by_width) == widths
        assert all(seconds > 0 for seconds in by_width.values())
    assert set(width["n_steps"]) <= set(widths)
    assert width["expected"] > 0
    assert f"widths of {sum(width['n_steps'].values())} steps" in served.render(dflash)
