"""What the kernels are compiled for, and the batches that a server runs before it serves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_dflash_kernels.specialisations import Server, of_server

from sglang_dflash.stages.dry_run import batch_sizes


@given(st.integers(1, 600), st.sampled_from([8, 12, 16, 24, 32, 48, 64]))
def test_batches_that_run_dry_meet_every_specialisation(n_requests: int, n_value_heads: int) -> None:
    server = Server(
        widths=(1, 2, 4, 6, 8, 12, 16),
        block_size=16,
        batch_sizes=range(1, n_requests + 1),
        n_value_heads=n_value_heads,
        value_width=128,
        tracks=True,
    )
    assert of_server(server._replace(batch_sizes=batch_sizes(n_requests))) == of_server(server)


@pytest.mark.parametrize(("n_value_heads", "n_tiles"), [(16, 2), (48, 2), (128, 1)])
def test_a_few_heads_are_cut_and_many_are_not(n_value_heads: int, n_tiles: int) -> None:
    server = Server((16,), 16, range(1, 65), n_value_heads=n_value_heads, value_width=128, tracks=False)
    assert len(of_server(server)["gdn_verify"]) == n_tiles
