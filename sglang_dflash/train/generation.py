"""Generation by a Transformers model without a server: many prompts per batch, for training text.

Prompts of similar length share a batch, padded on the left, so that all rows have the same length. Rows leave the batch
when they are finished. The KV cache is allocated once per batch; a layer's attention reads a view of it.

Shapes: B rows, P tokens of the longest prompt, L tokens of the cache, H query heads, G KV heads, D head size.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# Name of `grouped_attention` among Transformers' attention functions. Names with `flash` mean packages there.
GROUPED = "grouped_queries"
STEPS_PER_CHECK = 8  # decode steps between two removals of finished rows


class Prompt(NamedTuple):
    """Token ids to continue, and the temperature; 0 is greedy."""

    ids: list[int]
    temperature: float = 0.0


class Continuation(NamedTuple):
    """Continuation of a prompt."""

    prompt: int  # index of the prompt
    ids: list[int]  # without the stop token
    stopped: bool  # whether a stop token ended it, rather than the limit


class RoomyLayer(DynamicLayer):
    """Cache layer with room for `n_tokens`. Transformers' own layer copies all keys and values in every step."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__()
        self.n_tokens = n_tokens
        self.n_used = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [B, G, new, D], and return all of them, [B, G, L, D] each."""
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.room = key_states.new_empty(2, *key_states.shape[:2], self.n_tokens, key_states.shape[-1])
        span = slice(self.n_used, self.n_used + key_states.shape[2])
        self.room[0, :, :, span], self.room[1, :, :, span] = key_states, value_states
        self.n_used = span.stop
        self.keys, self.values = self.room[:, :, :, : span.stop]
        return self.keys, self.values

    def keep(self, rows: torch.Tensor) -> None:
        """Keep the given rows, int64, of the batch."""
        self.room = self.room[:, rows]


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention [B, 1, H, D] of one query per row, [B, H, 1, D], without repeating keys for the query heads.

    The query heads of a KV head become its queries. Several queries per row go to Transformers' own function.
    """
    B, H, n_queries, D = query.shape
    if n_queries > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.view(B, key.shape[1], -1, D)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(B, 1, H, D), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def require_attention_only(target: PreTrainedModel) -> None:
    """Check that the target has full attention layers only.

    Raises:
        ValueError: it has other layers, whose state does not fit `RoomyLayer`.
    """
    others = {type(layer).__name__ for layer in DynamicCache(config=target.config).layers} - {"DynamicLayer"}
    if others:
        raise ValueError(
            f"{target.name_or_path} has layers other than full attention ({', '.join(sorted(others))}); "
            "serve it and give --server"
        )


def generate(
    target: PreTrainedModel, prompts: Sequence[Prompt], *, stop_ids: set[int], limit: int, at_once: int, seed: int
) -> Iterator[Continuation]:
    """Yield a continuation for each prompt, in no particular order.

    Args:
        target: a model with full attention only.
        stop_ids: tokens that end a continuation.
        limit: most tokens of a continuation.
        at_once: rows of a batch.
        seed: seed of the sampling and of the order of the batches.
    """
    target.set_attn_implementation(GROUPED)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    batches = [by_length[first : first + at_once] for first in range(0, len(by_length), at_once)]
    Random(seed).shuffle(batches)  # so that the first answers are not only those of short prompts
    generator = torch.Generator(target.device).manual_seed(seed)
    for batch in batches:
        yield from _generate_batch(target, {i: prompts[i] for i in batch}, stop_ids, limit, generator)


@torch.inference_mode()
def _generate_batch(
    target: PreTrainedModel, prompts: dict[int, Prompt], stop_ids: set[int], limit: int, generator: torch.Generator
) -> Iterator[Continuation]:
    device, running = target.device, list(prompts)
    n_prompt = max(len(prompt.ids) for prompt in prompts.values())
    cache = Cache(
        layers=[RoomyLayer(n_prompt + limit) for _ in range(target.config.get_text_config().num_hidden_layers)]
    )
    ids_BL = torch.tensor([[0] * (n_prompt - len(p.ids)) + p.ids for p in prompts.values()], device=device)
    start_B = torch.tensor([n_prompt - len(p.ids) for p in prompts.values()], device=device)
    temperature_B = torch.tensor([p.temperature for p in prompts.values()], device=device)
    stops = torch.tensor(sorted(stop_ids), device=device)
    new_ids = ids_BL
    while running:
        first = ids_BL.shape[1] - new_ids.shape[1]
        position_L = torch.arange(ids_BL.shape[1], device=device)
        logits = target(
            input_ids=new_ids,
            attention_mask=(position_L >= start_B[:, None]).long(),
            position_ids=(position_L[first:] - start_B[:, None]).clamp(min=0),
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        new_ids = sampled(logits, temperature_B, generator)[:, None]
        ids_BL = torch.cat([ids_BL, new_ids], dim=1)
        n_new = ids_BL.shape[1] - n_prompt
        if n_new % STEPS_PER_CHECK and n_new < limit:
            continue
        has_stop_B = torch.isin(ids_BL[:, n_prompt:], stops).any(1)
        finished_B = has_stop_B | (n_new >= limit)
        for row in finished_B.nonzero()[:, 0].tolist():
            yield continuation(running[row], ids_BL[row, n_prompt:].tolist(), stop_ids)
        rows = (~finished_B).nonzero()[:, 0]
        if len(rows) < len(running):
            running = [running[row] for row in rows.tolist()]
            ids_BL, new_ids, start_B, temperature_B = ids_BL[rows], new_ids[rows], start_B[rows], temperature_B[rows]
            for layer in cache.layers:
                layer.keep(rows)


def continuation(prompt: int, ids: list[int], stop_ids: set[int]) -> Continuation:
    """Return the tokens before the first stop token."""
    n = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    return Continuation(prompt, ids[:n], n is not None)


def sampled(logits_BV: torch.Tensor, temperature_B: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a token per row, int64 [B]: sampled, or the argmax where the temperature is 0."""
    greedy_B = logits_BV.argmax(-1)
    hot = temperature_B > 0
    if hot.any():
        probs = (logits_BV[hot].float() / temperature_B[hot, None]).softmax(-1)
        greedy_B[hot] = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return greedy_B
