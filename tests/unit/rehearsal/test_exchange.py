"""Elements that ranks exchange, read back from a server's log."""

from sglang_dflash.rehearsal.exchange import SAID, steps_in


def test_two_ranks_lines_that_run_together_are_two_steps() -> None:
    log = f'ready\n{SAID}{{"rows": 16, "broadcast_": 16}}{SAID}{{"rows": 4}}\n\nINFO: {SAID}{{"rows": 1}}\nend'
    assert steps_in(log) == [{"rows": 16, "broadcast_": 16}, {"rows": 4}, {"rows": 1}]
