"""Every rank draws from random numbers of its own, in processes that have this folder on PYTHONPATH.

SGLang seeds all ranks alike, so that they draw alike even without an exchange. Here only an exchange between them makes
them. Python imports `sitecustomize` before anything else, so the module below is met while it is being loaded.
"""

from after_loading import edit_after_loading

MODULE = "sglang_dflash.stages.choice"
SAID = "random numbers of its own: rank "


def seed_by_rank(choice) -> None:
    """At the first prompt: SGLang seeds once more after the worker is made."""
    begin = choice.Choice.begin

    def first(self, batch) -> None:
        choice.Choice.begin = begin
        rank = choice.get_dp_tp_group().rank_in_group
        choice.torch.manual_seed(1 + rank)
        print(f"{SAID}{rank}", flush=True)
        begin(self, batch)

    choice.Choice.begin = first


edit_after_loading({MODULE: seed_by_rank})
