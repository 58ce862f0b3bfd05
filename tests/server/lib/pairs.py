"""Which pair a row of a battery serves."""

from pathlib import Path

from sglang_dflash.tiny.pairs import Pair
from tests.server.conftest import PAIRS, SECOND
from tests.server.lib.rehearsals import Rehearsal
from tests.server.lib.sliding import with_layers
from tests.server.lib.variants import Variant


def pair_of(row: Variant | Rehearsal, folder: Path) -> Pair:
    """A tiny pair, or, made in `folder`, one whose draft has other layer types than it was trained with."""
    pair = (SECOND if row.second else PAIRS)[row.target]
    return with_layers(pair, row.draft_layers, folder, both_ways=row.both_ways) if row.draft_layers else pair
