"""Decoding of a batch of prompts by a target, one step of fixed shapes at a time. On a GPU the step is a CUDA graph.

Prompts are padded on the left, so all rows write the same cache slot in a step. The step reads no value on the host.
All its tensors stay at their addresses. So one captured step serves all tokens of all batches of these shapes.

Shapes: B rows, S cache slots, L padded prompt tokens, V vocabulary, G key/value heads, Q query heads, E head width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GROUPED = "grouped_decode"  # `grouped_attention` in Transformers' table; a name with "flash" would mean FlashAttention
LOOK_EVERY = 16  # steps between two looks at the finished rows; each look waits for the GPU
WARM_UP = 3  # steps before a capture, as PyTorch's notes on CUDA graphs advise


def grouped_attention(
    module: torch.nn.Module,
    query_BQLE: torch.Tensor,
    key_BGSE: torch.Tensor,
    value_BGSE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from one token per row without copies of keys and values; from several tokens as Transformers does.

    The query heads of a group become the query positions of its key/value head, so the kernel reads each key once.
    """
    B, Q, L, E = query_BQLE.shape
    if L > 1:
        return sdpa_attention_forward(
            module, query_BQLE, key_BGSE, value_BGSE, attention_mask, scaling=scaling, **options
        )
    query = query_BQLE.reshape(B, key_BGSE.shape[1], -1, E)
    out = F.scaled_dot_product_attention(query, key_BGSE, value_BGSE, attn_mask=attention_mask, scale=scaling)
    return out.reshape(B, 1, Q, -1), None


AttentionInterface.register(GROUPED, grouped_attention)


@contextmanager
def grouped(target: PreTrainedModel) -> Iterator[None]:
    """Let the target use `grouped_attention` inside the context."""
    before = target.config._attn_implementation
    target.set_attn_implementation(GROUPED)
    try:
        yield
    finally:
        target.set_attn_implementation(before)


class Decoder:
    """Decoder of at most `n_rows` prompts whose tokens, with the new ones, fit in `n_slots` cache slots."""

    @torch.inference_mode()
    def __init__(
        self, target: PreTrainedModel, n_rows: int, n_slots: int, stop_ids: Sequence[int], *, capture: bool = False
    ) -> None:
        """`capture`: run the step as a CUDA graph."""
        device = target.device
        self.target = target
        self.n_rows = n_rows
        self.n_slots = n_slots
        self.pad_id = min(stop_ids, default=0)
        self.cache = StaticCache(config=target.config, max_cache_len=n_slots)
        self.stop_ids = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
        self.slots_S = torch.arange(n_slots, device=device)
        self.ids_BS = torch.zeros(n_rows, n_slots, dtype=torch.int64, device=device)
        self.slot_1 = torch.zeros(1, dtype=torch.int64, device=device)  # slot of the newest token
        self.start_B = torch.zeros(n_rows, dtype=torch.int64, device=device)  # slot of a row's first token
        self.finished_B = torch.zeros(n_rows, dtype=torch.bool, device=device)
        self.temperature_B1 = torch.ones(n_rows, 1, device=device)  # 1 for greedy rows
        self.noise_B1 = torch.zeros(n_rows, 1, device=device)  # factor of the noise: 0 for greedy rows, else 1
        self.graph = self.captured() if capture else None

    @torch.inference_mode()
    def write(self, prompts: Sequence[list[int]], temperatures: Sequence[float], limit: int) -> list[list[int]]:
        """Return at most `limit` new tokens per prompt, up to and including the first stop token.

        Args:
            temperatures: one per prompt; 0 is greedy.
        """
        run_step = self.step if self.graph is None else self.graph.replay
        with grouped(self.target):
            first = self.start(prompts, temperatures)
            n = 1
            while n < limit and not (n % LOOK_EVERY == 0 and bool(self.finished_B.all())):
                run_step()
                n += 1
        stops = set(self.stop_ids.tolist())
        found = self.ids_BS[: len(prompts), first : first + n].tolist()
        return [ids[: next((i + 1 for i, token in enumerate(ids) if token in stops), n)] for ids in found]

    def start(self, prompts: Sequence[list[int]], temperatures: Sequence[float]) -> int:
        """Read the prompts, choose the first new tokens, and return their slot. Rows without a prompt are finished."""
        device, n_unused = self.ids_BS.device, self.n_rows - len(prompts)
        rows = [torch.tensor(ids) for ids in [*prompts, *[[self.pad_id]] * n_unused]]
        ids_BL = pad_sequence(rows, batch_first=True, padding_value=self.pad_id, padding_side="left").to(device)
        L = ids_BL.shape[1]
        heat_B1 = torch.tensor([*temperatures, *[0.0] * n_unused], device=device)[:, None]
        self.temperature_B1.copy_(torch.where(heat_B1 > 0, heat_B1, 1.0))
        self.noise_B1.copy_(heat_B1 > 0)
        self.start_B.copy_(L - torch.tensor([len(ids) for ids in rows]))
        self.finished_B.copy_(torch.arange(self.n_rows) >= len(prompts))
        self.ids_BS[:, :L] = ids_BL
        self.slot_1.fill_(L)
        self.cache.reset()
        logits_BV = self.logits(ids_BL, self.slots_S[:L], self.prompt_mask(L))
        self.append(self.choose(logits_BV))
        return L

    def prompt_mask(self, L: int) -> torch.Tensor:
        """Return the prompts' mask, bool [B, 1, L, S]. Padding attends to itself, because NaN would spread."""
        slot_S, query_L1, start_B11 = self.slots_S, self.slots_S[:L, None], self.start_B[:, None, None]
        return (((slot_S >= start_B11) & (slot_S <= query_L1)) | (slot_S == query_L1))[:, None]

    def logits(self, ids_BL: torch.Tensor, slot_L: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Read tokens in consecutive slots, and return the logits after the last one, [B, V]."""
        position_BL = (slot_L - self.start_B[:, None]).clamp(min=0)
        out = self.target(
            input_ids=ids_BL,
            attention_mask=mask,
            position_ids=position_BL,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def step(self) -> None:
        """Read the newest token of all rows, and append the next token."""
        is_visible_BS = (self.slots_S >= self.start_B[:, None]) & (self.slots_S <= self.slot_1)
        bias_BS = torch.zeros_like(is_visible_BS, dtype=self.target.dtype).masked_fill_(~is_visible_BS, -torch.inf)
        logits_BV = self.logits(self.ids_BS.index_select(1, self.slot_1), self.slot_1, bias_BS[:, None, None])
        token_B = self.choose(logits_BV)
        self.slot_1 += 1
        self.append(token_B)

    def choose(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the argmax for greedy rows, and a sample for the others: the argmax with Gumbel noise."""
        noise_BV = torch.empty_like(logits_BV, dtype=torch.float32).exponential_().log_()
        return (logits_BV.float() / self.temperature_B1 - noise_BV * self.noise_B1).argmax(-1)

    def append(self, token_B: torch.Tensor) -> None:
        """Write the next tokens at the current slot; finished rows get padding."""
        token_B = token_B.masked_fill(self.finished_B, self.pad_id)
        self.ids_BS.index_copy_(1, self.slot_1, token_B[:, None])
        self.finished_B |= (token_B[:, None] == self.stop_ids).any(1)

    def captured(self) -> torch.cuda.CUDAGraph:
        """Capture the step in a CUDA graph.

        The default generator of the GPU draws the noise. PyTorch advances it at each replay.
        """
        with grouped(self.target), torch.cuda.device(self.ids_BS.device):
            self.start([], [])
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
        return graph
