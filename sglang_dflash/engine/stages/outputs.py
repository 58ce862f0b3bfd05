"""Optional outputs per token: hidden state or features, the sampler's support (tokens that may be drawn), experts.

As without speculation, a token's outputs belong to the token row whose logits the token was drawn from. SGLang's
scheduler reads the rows of the committed tokens, by request and slot. If no request of a batch needs the outputs,
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput, SamplingMaskOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import get_server_return_hidden_states_mode
from sglang.srt.utils import async_h2d
from sglang.srt.utils.common import get_cuda_graph_max_batch_size
from torch import nn

from sglang_dflash.errors import NotSupported


class HiddenStates:
    """Rows for requests with `return_hidden_states`: hidden states after the target's final norm, [T, hidden size]."""

    n_waiting = 0  # prompts whose features are copied while the next prompt is read

    @staticmethod
    def rows(output: LogitsProcessorOutput) -> torch.Tensor:
        """Return the rows of all tokens, in memory that the next replay of a graph may overwrite."""
        return output.last_hidden_states

    def copied(self, batch: ScheduleBatch, output: LogitsProcessorOutput) -> torch.Tensor | None:
        """Return a copy of the rows; None if no request needs them.

        A copy is needed, because a graph's next replay may overwrite the output before it is transferred to the host.
        """
        return self.rows(output).clone() if batch.return_hidden_states else None

    def of_prompts(self, batch: ScheduleBatch, output: LogitsProcessorOutput) -> torch.Tensor | None:
        """Return rows of every prompt token, or of each prompt's last token, depending on the server's mode.

        None if no request needs them.
        """
        if not batch.return_hidden_states or get_server_return_hidden_states_mode().is_full():
            return self.copied(batch, output)
        last = [end - 1 for end in accumulate(batch.extend_lens)]
        return self.rows(output).index_select(0, async_h2d(last, dtype=torch.int64, device=batch.device))


class Features(HiddenStates):
    """Variant of `HiddenStates` whose rows are the draft's features, [T, C]: outputs of the captured layers.

    The layers are in the order of the draft.
    """

    n_waiting = 1

    @staticmethod
    def rows(output: LogitsProcessorOutput) -> torch.Tensor:
        return output.hidden_states


def hidden_states_of(model: nn.Module, *, features: bool) -> HiddenStates:
    """Return the variant of `HiddenStates` that this server uses, and prepare the target. Call this before capture.

    Raises:
        NotSupported: see `keep_hidden_states`.
    """
    if features:
        return Features()
    keep_hidden_states(model)
    return HiddenStates()


def keep_hidden_states(model: nn.Module) -> None:
    """Make the target return its last hidden states in addition to the features, if the server returns hidden states.

    Raises:
        NotSupported: the target has no `LogitsProcessor`, which returns the hidden states.
    """
    if not get_server_return_hidden_states_mode().need_capture():
        return
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not processors:
        raise NotSupported(
            f"{type(model).__name__} computes its logits without SGLang's LogitsProcessor, which keeps hidden states; "
            "leave out --enable-return-hidden-states and --return-hidden-states-mode"
        )
    for processor in processors:
        processor.keep_last_hidden_states = True


def experts_of_blocks(widest: int) -> Callable[..., Any]:
    """Return a hook around `RoutedExpertsCapturer.create` for verifies of up to `widest` tokens per request.

    SGLang's buffer has as many rows as requests run at once, or as a chunk of a prompt has tokens. A verify needs a row
    per request and slot. SGLang may round up the number of requests of a captured graph.
    """

    def create(stock: Callable[..., Any], *, max_running_requests: int, **others: Any) -> Any:
        n_requests = get_cuda_graph_max_batch_size(max_running_requests)
        return stock(max_running_requests=n_requests * widest, **others)

    return create


def sampling_masks_by_block(
    batch: ScheduleBatch, output: LogitsProcessorOutput, n_committed_B: torch.Tensor, width: int
) -> None:
    """Split the sampling masks in `output` by request, from [R * N, ...] to [R, N, ...].

    Also store each request's number of committed tokens in the masks. R is the number of requests that need sampling
    masks, and N the width. Without such requests nothing changes.
    """
    masks = output.sampling_mask_output
    if masks is None:
        return

    def split(rows: torch.Tensor | None) -> torch.Tensor | None:
        return None if rows is None else rows.view(-1, width, *rows.shape[1:])

    output.sampling_mask_output = SamplingMaskOutput(
        token_ids=split(masks.token_ids),
        lengths=split(masks.lengths),
        selected_logprobs=split(masks.selected_logprobs),
        support_logprobs=split(masks.support_logprobs),
        statuses=split(masks.statuses),
        num_accept_tokens=n_committed_B.index_select(0, batch.sampling_info.sampling_mask_batch_indices),
    )
