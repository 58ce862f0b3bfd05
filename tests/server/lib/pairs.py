"""Target and draft of a row of `VARIANTS` or `REHEARSALS`."""

import json
import shutil
from pathlib import Path

from sglang_dflash.pairs.tiny.pairs import Pair
from tests.server.conftest import PAIRS, SECOND
from tests.server.lib.rehearsals import Rehearsal
from tests.server.lib.variants import WINDOW, Variant


def pair_of(row: Variant | Rehearsal, folder: Path, window: int = WINDOW) -> Pair:
    """Return a tiny pair. If the row has `draft_layers`, the draft is a copy in `folder` with these layer types.

    The copy's drafts are accepted less often. The tests allow that, because they compare steps with the reference. Its
    sliding layers have a window of `window` tokens, own token included. With `both_ways` they are non-causal in blocks.
    """
    pair = (SECOND if row.second else PAIRS)[row.target]
    if not row.draft_layers:
        return pair
    draft = Path(shutil.copytree(pair.draft, folder / "draft"))
    config = json.loads((draft / "config.json").read_text())
    assert len(row.draft_layers) == config["num_hidden_layers"]
    config |= {"layer_types": list(row.draft_layers), "sliding_window": window, "use_sliding_window": True}
    (draft / "config.json").write_text(json.dumps(config | ({"is_causal": False} if row.both_ways else {})))
    return pair._replace(draft=draft)
