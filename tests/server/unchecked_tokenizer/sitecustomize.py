"""Switch off the plugin's checks in the tokenizing process, in processes that have this folder on PYTHONPATH.

Then the scheduler gets harmful requests unchecked, as it does over gRPC, and must refuse them itself.
"""

from after_loading import edit_after_loading

MODULE = "sglang_dflash.engine.host.admission"


def pass_all(admission) -> None:
    admission.check_prompt = lambda stock, manager, request, input_ids: stock(manager, request, input_ids)
    admission.check_parameters = lambda made, *_: made


edit_after_loading({MODULE: pass_all})
