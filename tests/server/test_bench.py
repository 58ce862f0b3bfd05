"""`sglang-dflash bench` against real servers: its report has the servers' counts and finds their answers equal."""

import json
from pathlib import Path

import pytest

from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.tools.bench.__main__ import main
from sglang_dflash.tools.bench.client import HttpEngine
from sglang_dflash.tools.bench.engine import Sampling, TokenIds

pytestmark = pytest.mark.full
MAX_NEW_TOKENS = 32


def test_report_agrees_with_the_servers(off: Server, whole: Server, tmp_path: Path) -> None:
    arms = [f"off={off.url}", f"ours={whole.url}"]
    asked = ["--num-prompts", "4", "--max-new-tokens", str(MAX_NEW_TOKENS), "--concurrency", "1", "4", "--repeats", "2"]
    main(["--base-url", *arms, *asked, "--require-equal", "--output", str(tmp_path / "out")])
    document = json.loads((tmp_path / "out.json").read_text())
    assert [document["arms"][name]["kind"] for name in ("off", "ours")] == ["sglang", "sglang"]
    for off_line, line in zip(document["summary"][::2], document["summary"][1::2], strict=True):
        assert (off_line["n_equal"], line["n_equal"]) == (4, 4)
        assert off_line["committed_per_step"] == 1.0
        assert line["committed_per_step"] > 1.5
        shares = line["acceptance_by_position"]
        assert shares == sorted(shares, reverse=True)
        # The sum of acceptance rates over positions is the mean number of accepted drafts.
        assert line["committed_per_step"] == pytest.approx(1 + sum(shares), abs=0.01)
        assert line["ttft_ms"]["p50"] > 0
        assert line["tpot_ms"]["p50"] > 0
    of_off, of_ours = ([row for row in document["rows"] if row["arm"] == arm] for arm in ("off", "ours"))
    assert [row["n_tokens"] for row in of_off] == [row["n_tokens"] for row in of_ours]
    assert len({row["n_prompt_tokens"] for row in document["rows"]}) == 1
    assert {width for turn in document["widths"] for width in turn["n_steps"]} == {"16"}


def test_token_ids_reach_the_target_unchanged(off: Server, ours: Server, tmp_path: Path) -> None:
    arms = [f"off={off.url}", f"ours={ours.url}"]
    asked = ["--dataset", "hopeless", "--num-prompts", "2", "--concurrency", "1", "--repeats", "1", "--no-latency"]
    main(["--base-url", *arms, *asked, "--require-equal", "--output", str(tmp_path / "out")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["n_prompt_tokens"], row["n_tokens"]) for row in rows] == [(2 * 32, 2 * 48)] * 2


def test_server_returns_its_two_likeliest_tokens(off: Server) -> None:
    """`bench` reads the two likeliest tokens after a part of an answer, to find near ties."""
    engine = HttpEngine("off", off.url)
    engine.meet()
    answer = engine.ask([{"role": "user", "content": "Hello"}], Sampling(max_new_tokens=4), stream=False)()
    assert len(answer.prompt_ids) == answer.n_prompt_tokens
    for n in range(4):
        top = engine.likeliest([*answer.prompt_ids, *answer.token_ids[:n]])
        (token, best), (other, second) = top.items()
        assert (token, best > second, other != token) == (answer.token_ids[n], True, True)
    assert engine.ask(TokenIds(answer.prompt_ids), Sampling(max_new_tokens=4), stream=False)() == answer
