"""Write `oracle.json`: tokens and accepted drafts of every step of the PyTorch reference, for `cases.CASES`.

    python -m tests.engines.write_oracle

Plain torch is the target in Transformers with `sglang_dflash.reference.torch`. Tests of other engines read the file, so
they need no torch.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.pairs.tiny.workloads import held_out
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.generate import Options, spec_steps
from sglang_dflash.reference.torch.target import stop_token_ids
from tests.engines.cases import ASSETS, CASES, MAX_NEW_TOKENS, ORACLE, Case

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


Conversation = list[dict[str, str]]


def reference(
    case: Case, n_prompts: int, conversations: Sequence[Conversation] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield prompt, stop tokens and steps for the first `n_prompts` conversations (default: held-out ones)."""
    folder, dtype = ASSETS / case.target / "target", DTYPES[case.dtype]
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with TemporaryDirectory() as parent:
        draft = DraftModel.from_pretrained(case.draft_folder(Path(parent)), dtype=dtype)
    options = Options(
        max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=stop_token_ids(target), draft_window=case.draft_window
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for conversation in (conversations or held_out(case.n_prompts, seed=5))[:n_prompts]:
        prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        steps = spec_steps(draft, target, torch.tensor([prompt]), options)
        yield {"prompt": prompt, "stop": options.stop_token_ids, "steps": [tuple(step) for step in steps]}


if __name__ == "__main__":
    lines = (
        f'"{name}": [\n' + ",\n".join(json.dumps(answer) for answer in reference(case, case.n_prompts)) + "\n]"
        for name, case in CASES.items()
    )
    ORACLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
