"""The tiny drafts with other layer types than they were trained with: worse drafts, whose steps are as well defined."""

import json
import shutil
from pathlib import Path

from sglang_dflash.tiny.pairs import Pair

WINDOW = 64


def with_layers(pair: Pair, layer_types: tuple[str, ...], folder: Path, *, both_ways: bool = False) -> Pair:
    """`pair` with a copy of its draft in `folder`, whose sliding layers look back 64 tokens, their own included.

    both_ways: they see their whole block too.
    """
    draft = folder / "draft"
    shutil.copytree(pair.draft, draft)
    config = json.loads((draft / "config.json").read_text())
    assert len(layer_types) == config["num_hidden_layers"]
    config |= {"layer_types": list(layer_types), "sliding_window": WINDOW, "use_sliding_window": True}
    if both_ways:
        config["is_causal"] = False
    (draft / "config.json").write_text(json.dumps(config))
    return pair._replace(draft=draft)
