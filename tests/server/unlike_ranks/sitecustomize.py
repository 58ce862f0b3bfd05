"""Different random numbers on every rank, in processes that have this folder on PYTHONPATH.

SGLang seeds all ranks alike, so they draw alike even without an exchange. Here only an exchange makes them agree.
"""

from after_loading import edit_after_loading

MODULE = "sglang_dflash.stages.choice"
LINE = "random numbers of its own: rank "


def seed_by_rank(choice) -> None:
    """Seed at the first prompt, because SGLang seeds again after the worker is made."""
    begin = choice.Choice.begin

    def first(self, batch) -> None:
        choice.Choice.begin = begin
        rank = choice.get_dp_tp_group().rank_in_group
        choice.torch.manual_seed(1 + rank)
        print(f"{LINE}{rank}", flush=True)
        begin(self, batch)

    choice.Choice.begin = first


edit_after_loading({MODULE: seed_by_rank})
