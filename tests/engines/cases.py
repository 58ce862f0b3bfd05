"""Cases for tests of all engines: the shipped tiny pairs, unchanged or with a sliding window. Imports no framework."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

ASSETS = Path(__file__).parents[2] / "sglang_dflash" / "assets"
ORACLE = Path(__file__).with_name("oracle.json")
MAX_NEW_TOKENS = 64
FULL, SLIDING = "full_attention", "sliding_attention"


def tokens_of(reference: dict[str, Any]) -> list[int]:
    return [token for committed, _ in reference["steps"] for token in committed]


class Case(NamedTuple):
    """Pair of checkpoints.

    `changed`: fields that replace those of the draft's config.json. `dtype`: dtype of the reference steps.
    """

    target: str
    draft: str = "draft"
    n_prompts: int = 16
    draft_window: int | None = None
    dtype: str = "float32"
    changed: dict[str, Any] = {}  # noqa: RUF012

    @property
    def n_drafts(self) -> int:
        return json.loads((ASSETS / self.target / self.draft / "config.json").read_text())["block_size"] - 1

    def draft_folder(self, parent: Path) -> Path:
        folder = Path(shutil.copytree(ASSETS / self.target / self.draft, parent / "draft"))
        config = json.loads((folder / "config.json").read_text()) | self.changed
        (folder / "config.json").write_text(json.dumps(config))
        return folder


WINDOW = {"sliding_window": 32, "use_sliding_window": True}
CASES = {
    "hybrid-bf16": Case("tiny", dtype="bfloat16"),  # on a CPU, vLLM's Gated DeltaNet runs only in bf16
    "hybrid": Case("tiny"),
    "dense": Case("tiny_dense"),
    "hybrid-dflash2": Case("tiny", "draft2"),
    "dense-dflash2": Case("tiny_dense", "draft2"),
    "window": Case("tiny", n_prompts=4, draft_window=32),
    "sliding": Case("tiny", n_prompts=4, changed=WINDOW | {"layer_types": [SLIDING, FULL]}),
    "sliding-both-ways": Case(
        "tiny_dense", n_prompts=4, changed=WINDOW | {"layer_types": [SLIDING] * 2, "is_causal": False}
    ),
}
ORACLE_STEPS: dict[str, list[dict[str, Any]]] = json.loads(ORACLE.read_text()) if ORACLE.exists() else {}
IN_FP32 = [name for name, case in CASES.items() if case.dtype == "float32"]  # in bf16 steps depend on rounding
