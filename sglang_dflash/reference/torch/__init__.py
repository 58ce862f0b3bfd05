"""DFlash in PyTorch: the draft model, and speculative generation with Transformers targets.

    from sglang_dflash.reference.torch import DraftModel

    draft = DraftModel.from_pretrained("z-lab/Qwen3-8B-DFlash-b16", dtype=target.dtype, device=target.device)
    output_ids = draft.spec_generate(input_ids, target, max_new_tokens=2048, stop_token_ids=[tokenizer.eos_token_id])

This package does not import sglang. The trainer trains this draft. The draft's forward is also the independent
reference for the steps that SGLang serves. `engine/draft/checkpoint.py` reads checkpoints for this package and for
SGLang. No code of a checkpoint is executed.
"""

from sglang_dflash.engine.draft.record import Checkpoint as DraftConfig
from sglang_dflash.reference.torch.draft import ContextKV
from sglang_dflash.reference.torch.generate import DecodedStep
from sglang_dflash.reference.torch.pretrained import DraftModel

__all__ = ["ContextKV", "DecodedStep", "DraftConfig", "DraftModel"]
