"""The Grafana dashboard shows only exported metrics, and every metric of this plugin. docs/metrics.md has the table."""

import json
import re
from itertools import combinations
from typing import Any

from sglang_dflash.engine.metrics.table import METRICS, PREFIX, table
from sglang_dflash.tools.pages import DASHBOARD as DASHBOARD_FILE
from tests.fixtures.guide import ROOT, source_of_sglang

PAGE = ROOT / "sglang_dflash" / "docs" / "metrics.md"
DASHBOARD = json.loads(DASHBOARD_FILE.read_text())
NAME = re.compile(r"sglang:\w+")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def used() -> set[str]:
    variables = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    return {name for query in expressions() + variables for name in NAME.findall(query)}


def test_every_name_in_the_dashboard_is_exported() -> None:
    ours = {name for metric in METRICS for name in metric.exported()}
    assert {name for name in used() if name.startswith(PREFIX)} <= ours
    source = source_of_sglang("srt/observability/metrics_collector.py")
    assert not {name for name in used() - ours if f'name="{name}"' not in source}


def test_every_metric_is_in_the_dashboard() -> None:
    assert [metric.name for metric in METRICS if not metric.exported() & used()] == []


def test_labels_are_those_of_the_metric() -> None:
    for query in expressions():
        known = {
            "le",
            "model_name",
            *(la for m in METRICS if m.exported() & set(NAME.findall(query)) for la in m.labels),
        }
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
        assert grouped <= known, query


def test_queries_are_balanced_and_filter_by_the_chosen_servers() -> None:
    for query in expressions():
        assert query.count("(") == query.count(")"), query
        assert query.count('{model_name=~"$model_name",instance=~"$instance"}') == len(NAME.findall(query)), query


def test_panels_are_distinct_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["title"] and panel["description"] for panel in panels())
    for a, b in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        assert (
            a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        )  # fmt: skip


def test_the_readme_has_the_table() -> None:
    assert table() in PAGE.read_text(), "run `python -m tests.tools.tables.write`"
