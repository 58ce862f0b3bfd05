"""Memory of a block per request for Qwen3.5-27B: three pages quote the computed numbers."""

from pathlib import Path

import pytest

from sglang_dflash.flags import Worker
from sglang_dflash.tools.capacity import report as capacity_report
from tests.fixtures.guide import DOCS, ROOT


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "from-stock.md", DOCS / "memory.md"], ids=lambda page: page.name
)
def test_page_has_the_computed_bytes(page: Path) -> None:
    argv = ["--model", "Qwen3.5-27B", "--gpu-memory", "140.4"]
    results = capacity_report.answer(capacity_report.arguments().parse_args(argv)).results
    mib = {worker: f"{results[worker].request_block_bytes / 2**20:,.0f}" for worker in Worker}
    text = page.read_text()
    assert f"{mib[Worker.PLUGIN]} MiB" in text
    assert mib[Worker.STOCK] in text
