"""The step trace must have the width and the numbers of accepted and copied drafts of each step."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dflash.engine.metrics.trace import Trace, traced
from sglang_dflash.engine.stages.copier import NoCopies, TextCopies
from sglang_dflash.engine.stages.stages import Stages

TEXT = [*range(1, 21), *range(1, 16)]  # the last fifteen tokens occurred before, followed by 16, 17, ...
TABLE = torch.zeros(2, 60, dtype=torch.int32)


def lines(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.iterdir()
    assert file.stem == str(os.getpid()), "ranks on one machine need a file each"
    return [json.loads(line) for line in file.read_text().splitlines()]


def plan(width: int) -> Any:
    return SimpleNamespace(
        prefix_len_B=torch.tensor([len(TEXT), 2]),
        rows_B=torch.tensor([0, 1], dtype=torch.int64),
        width=width,
        n_requests=2,
    )


def test_copied_drafts_are_counted_among_the_accepted(tmp_path: Path) -> None:
    copies = TextCopies(TABLE, vocab_size=100, widest=16)
    copies.text_QM[0, : len(TEXT)] = torch.tensor(TEXT)
    copies.text_QM[1, :2] = torch.tensor([50, 51])
    trace = Trace(tmp_path, copies)
    block_BN = torch.tensor([[16, 60, 61, 62], [52, 53, 54, 55]])
    assert trace.copy(plan(4), block_BN).tokens_BN.tolist() == [[16, 17, 18, 19], [52, 53, 54, 55]]
    trace.copy(plan(1), block_BN[:, :1])  # the second step is launched before the first one's outcome
    trace.add(["a", "b"], 4, [2, 1], 1.0)  # nothing was copied for b, and two of its block's three drafts failed
    trace.add(["a", "b"], 1, [0, 0], 2.0)
    assert lines(tmp_path) == [
        {"s": 1.0, "width": 4, "accepted": {"a": 2, "b": 1}, "copied": {"a": 2, "b": 0}},
        {"s": 2.0, "width": 1, "accepted": {"a": 0, "b": 0}, "copied": {"a": 0, "b": 0}},
    ]


def test_traces_without_copies_have_no_copied_field(tmp_path: Path) -> None:
    stages: Any = Stages(*Stages._fields)._replace(copier=NoCopies())
    assert traced(stages, None) == (stages, None)
    same, add = traced(stages, tmp_path / "new")
    assert same == stages
    add(["a"], 8, [7], 1.5)
    assert lines(tmp_path / "new") == [{"s": 1.5, "width": 8, "accepted": {"a": 7}}]


def test_tracing_wraps_the_copier(tmp_path: Path) -> None:
    copies = TextCopies(TABLE, vocab_size=100, widest=16)
    stages: Any = Stages(*Stages._fields)._replace(copier=copies)
    found, _ = traced(stages, tmp_path)
    assert found._replace(copier=copies) == stages
    assert found.copier.copy.__self__.copier is copies
    assert found.copier.text_QM is copies.text_QM, "other attributes are the copier's"
