"""How each step of a generation must go, according to the plain-torch DFlash."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import takewhile

import torch
from transformers import AutoModelForCausalLM

from launch.tiny import Pair
from sglang_dflash.model import DraftModel
from sglang_dflash.model.generate import Options, draft_logits, spec_steps
from sglang_dflash.model.target import Target, stop_token_ids


class Oracle:
    """One pair in fp32, greedy."""

    def __init__(self, pair: Pair, block_size: int | None, draft_window: int | None, page_size: int = 1) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
        self.draft = DraftModel.from_pretrained(pair.draft, dtype=torch.float32)
        self.block_size, self.draft_window, self.page_size = block_size, draft_window, page_size

    def accepted_histogram(self, prompt: Sequence[int], max_new_tokens: int, n_unseen: int = 0) -> dict[int, int]:
        """How many decode steps accepted 0, 1, 2, ... drafts; the prompt's own step is not one of them."""
        options = Options(
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids(self.target),
            block_size=self.block_size,
            draft_window=self.draft_window,
            page_size=self.page_size,
            n_unseen=n_unseen,
        )
        _, *steps = spec_steps(self.draft, self.target, torch.tensor([prompt]), options)
        return dict(Counter(step.n_accepted for step in steps))

    @torch.inference_mode()
    def accepted_at(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """How many drafts a step with this token as its anchor accepts, for every token of the target's own answer.

        Of the last block's tokens it is how many are known to be accepted.
        """
        text = torch.tensor([*prompt, *answer])
        features = Target(self.target, self.draft.config.target_layer_ids).read(text[None]).features_1SC
        anchors_1A = torch.arange(len(prompt), len(text))[None]
        N = self.block_size or self.draft.config.block_size
        tokens_1AN = torch.full((1, len(answer), N), self.draft.config.mask_token_id)
        tokens_1AN[0, :, 0] = text[anchors_1A[0]]
        hidden_1ANH = self.draft(
            self.target.get_input_embeddings()(tokens_1AN),
            self.draft.context_kv(features),
            anchors_1A,
            self.draft_window,
        )
        guesses_AD = draft_logits(hidden_1ANH[0, :, 1:], self.target).argmax(-1).tolist()
        following = [answer[i + 1 :] for i in range(len(answer))]
        return [
            len(list(takewhile(bool, (guess == token for guess, token in zip(guesses, after, strict=False)))))
            for guesses, after in zip(guesses_AD, following, strict=True)
        ]


@cache
def oracle(pair: Pair, block_size: int | None, draft_window: int | None, page_size: int = 1) -> Oracle:
    return Oracle(pair, block_size, draft_window, page_size)
