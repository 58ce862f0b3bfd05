"""The pair that a row of a battery serves."""

import json
import shutil
from pathlib import Path

from sglang_dflash.tiny.pairs import Pair
from tests.server.conftest import PAIRS, SECOND
from tests.server.lib.rehearsals import Rehearsal
from tests.server.lib.variants import WINDOW, Variant


def pair_of(row: Variant | Rehearsal, folder: Path) -> Pair:
    """Return a tiny pair, or one whose draft, copied into `folder`, has other layer types than in training.

    Such a draft is worse, and its steps are as well defined. Its sliding layers look back 64 tokens, their own
    included. With `both_ways` they see their whole block too.
    """
    pair = (SECOND if row.second else PAIRS)[row.target]
    if not row.draft_layers:
        return pair
    draft = Path(shutil.copytree(pair.draft, folder / "draft"))
    config = json.loads((draft / "config.json").read_text())
    assert len(row.draft_layers) == config["num_hidden_layers"]
    config |= {"layer_types": list(row.draft_layers), "sliding_window": WINDOW, "use_sliding_window": True}
    (draft / "config.json").write_text(json.dumps(config | ({"is_causal": False} if row.both_ways else {})))
    return pair._replace(draft=draft)
