"""Continuations of prompts by a target in this process: with `decode.Decoder` or Transformers' `generate`."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from random import Random
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from sglang_dflash.train.decode import Decoder

CACHE_SLOTS = 2**18  # largest number of rows x slots of a batch's cache: 6 GB for SmolLM2-135M, 39 GB for Qwen3-8B
BUCKET = 128  # cache slots are a multiple of this number, so that few shapes occur
READS_ON_HOST = ("dynamic", "longrope")  # rotary embeddings that compare positions on the host
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Continuation(NamedTuple):
    """Continuation of a prompt."""

    prompt: int  # index of the prompt
    ids: list[int]  # without the stop token
    stopped: bool  # whether a stop token ended it, rather than the limit


class Asked(NamedTuple):
    """Prompts to continue, each with its temperature, and the ends of a continuation."""

    prompts: Sequence[list[int]]
    temperatures: Sequence[float]  # 0 is greedy
    limit: int  # largest number of new tokens
    stop_ids: tuple[int, ...]


class Writer(Protocol):
    """Writer of continuations, in batches of at most `at_once` prompts."""

    name: str  # for the user: the method, and its reason
    captures: bool  # whether it captures CUDA graphs

    def write(self, asked: Asked, order: Random) -> Iterator[Continuation]:
        """Yield a continuation of each prompt. Batches are in an order drawn from `order`."""


def writer_for(target: PreTrainedModel, at_once: int) -> Writer:
    """Return the fastest writer that the target's layers permit."""
    if reason := obstacle(target):
        return GenerateWriter(target, at_once, reason)
    return StaticWriter(target, at_once)


def obstacle(target: PreTrainedModel) -> str:
    """Return the reason why `decode.Decoder` cannot run a target; "" if it can."""
    kinds = {type(layer).__name__ for layer in DynamicCache(config=target.config).layers}
    if kinds != {DynamicLayer.__name__}:
        return f"its cache has layers of type {', '.join(sorted(kinds))}" if kinds else "it has no cache"
    if target.config._attn_implementation != "sdpa":
        return f"its attention is {target.config._attn_implementation}"
    fields = target.config.get_text_config().to_dict()
    rope = fields.get("rope_parameters") or {}
    if rope.get("rope_type") in READS_ON_HOST:
        return f"its rotary embedding is {rope['rope_type']}"
    if any(fields.get(name) for name in EXPERTS):
        return "it has experts"
    return ""


class StaticWriter:
    """Writer with `decode.Decoder`. Batches have rows of similar length, of any temperature."""

    may_capture = True  # False: no writer made from now on captures CUDA graphs

    def __init__(self, target: PreTrainedModel, at_once: int) -> None:
        self.captures = self.may_capture and target.device.type == "cuda"
        self.name = "a decode step of fixed shapes" + (", as a CUDA graph" if self.captures else "")
        self.target = target
        self.at_once = at_once
        self.decoder: Decoder | None = None

    def write(self, asked: Asked, order: Random) -> Iterator[Continuation]:
        """See `Writer`. Batches of equal shapes follow each other, because they share a decoder."""
        batches = self.batches([len(ids) for ids in asked.prompts], asked.limit)
        shapes = sorted(batches)
        order.shuffle(shapes)
        try:
            for n_rows, n_slots in shapes:
                order.shuffle(batches[n_rows, n_slots])
                self.decoder = None  # frees its memory before another decoder takes memory
                self.decoder = Decoder(self.target, n_rows, n_slots, asked.stop_ids, capture=self.captures)
                for batch in batches[n_rows, n_slots]:
                    yield from self.written(asked, batch, self.decoder)
        finally:  # also if the caller asks for no more
            self.decoder = None

    def written(self, asked: Asked, batch: list[int], decoder: Decoder) -> Iterator[Continuation]:
        temperatures = [asked.temperatures[i] for i in batch]
        found = decoder.write([asked.prompts[i] for i in batch], temperatures, asked.limit)
        for i, ids in zip(batch, found, strict=True):
            yield ended(i, ids, asked.stop_ids)

    def batches(self, lengths: Sequence[int], limit: int) -> dict[tuple[int, int], list[list[int]]]:
        """Group prompts by length, and return lists of their indices by shape: (rows, cache slots).

        A graph needs full batches, so the last batch of a GPU gets empty rows.
        """
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        found: dict[tuple[int, int], list[list[int]]] = {}
        is_padded = self.target.device.type == "cuda"
        first = 0
        while first < len(order):
            n_slots = -(-(lengths[order[first]] + limit) // BUCKET) * BUCKET
            n_rows = min(self.at_once, max(1, CACHE_SLOTS // n_slots), len(order))
            batch = order[first : first + n_rows]
            found.setdefault((n_rows if is_padded else len(batch), n_slots), []).append(batch)
            first += n_rows
        return found


class GenerateWriter:
    """Writer with Transformers' `generate`. A batch has prompts of one temperature and of similar length."""

    captures = False

    def __init__(self, target: PreTrainedModel, at_once: int, reason: str) -> None:
        self.name = f"Transformers' generate, because {reason}"
        self.target = target
        self.at_once = at_once

    @torch.inference_mode()
    def write(self, asked: Asked, order: Random) -> Iterator[Continuation]:
        """See `Writer`."""
        by_heat = sorted(range(len(asked.prompts)), key=lambda i: (asked.temperatures[i], len(asked.prompts[i])))
        batches: list[list[int]] = []
        for _, same in groupby(by_heat, key=lambda i: asked.temperatures[i]):
            rows = list(same)
            batches += [rows[first : first + self.at_once] for first in range(0, len(rows), self.at_once)]
        order.shuffle(batches)
        for batch in batches:
            for i, ids in zip(batch, self.generated(asked, batch), strict=True):
                yield ended(i, ids, asked.stop_ids)

    def generated(self, asked: Asked, batch: list[int]) -> list[list[int]]:
        """Return the new tokens of a batch's prompts, padded after a stop token."""
        device, pad_id = self.target.device, min(asked.stop_ids, default=0)
        temperature, tokens = asked.temperatures[batch[0]], [torch.tensor(asked.prompts[i]) for i in batch]
        ids_BL = pad_sequence(tokens, batch_first=True, padding_value=pad_id, padding_side="left")
        mask_BL = pad_sequence([torch.ones_like(one) for one in tokens], batch_first=True, padding_side="left")
        sampled: dict[str, Any] = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        found = self.target.generate(  # type: ignore[operator]  # a method that transformers mixes in
            ids_BL.to(device),
            attention_mask=mask_BL.to(device),
            max_new_tokens=asked.limit,
            eos_token_id=sorted(asked.stop_ids) or None,
            pad_token_id=pad_id,
            do_sample=temperature > 0,
            **sampled,
        )
        return [list(map(int, ids)) for ids in found[:, ids_BL.shape[1] :].tolist()]


def ended(prompt: int, ids: list[int], stop_ids: Sequence[int]) -> Continuation:
    """Cut a continuation before its first stop token."""
    n = next((n for n, token in enumerate(ids) if token in stop_ids), None)
    return Continuation(prompt, ids[:n], n is not None)
