"""DFlash in plain torch: the draft model, and speculative generation with Transformers targets.

    from sglang_dflash.model import DraftModel

    draft = DraftModel.from_pretrained("z-lab/Qwen3-8B-DFlash-b16", dtype=target.dtype, device=target.device)
    output_ids = draft.spec_generate(input_ids, target, max_new_tokens=2048, stop_token_ids=[tokenizer.eos_token_id])

This package does not import sglang. The trainer trains this draft. The draft's forward is also the independent
reference for the steps that SGLang serves. `sglang_dflash.draft.checkpoint` reads checkpoints for this package and for
SGLang. No code of a checkpoint is executed.
"""

from sglang_dflash.draft.record import Checkpoint as DraftConfig
from sglang_dflash.model.draft import ContextKV
from sglang_dflash.model.generate import DecodedStep
from sglang_dflash.model.pretrained import DraftModel

__all__ = ["ContextKV", "DecodedStep", "DraftConfig", "DraftModel"]
