"""Seed every rank differently, in processes that have this folder on PYTHONPATH.

SGLang seeds all ranks alike, so they draw the same tokens even without an exchange. With different seeds they agree
only if they exchange the drawn tokens.
"""

from after_loading import edit_after_loading

MODULE = "sglang_dflash.engine.stages.choice"
LINE = "random numbers of its own: rank "


def seed_by_rank(choice) -> None:
    """Seed when the first prompt arrives, because SGLang seeds again after it has made the worker."""
    begin = choice.Choice.begin

    def first(self, batch) -> None:
        choice.Choice.begin = begin
        rank = choice.get_dp_tp_group().rank_in_group
        choice.torch.manual_seed(1 + rank)
        print(f"{LINE}{rank}", flush=True)
        begin(self, batch)

    choice.Choice.begin = first


edit_after_loading({MODULE: seed_by_rank})
