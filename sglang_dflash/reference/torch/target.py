"""Transformers causal LM as DFlash uses it: reads tokens, returns features, and can undo rejected tokens.

Attention layers undo tokens by dropping their keys and values. No token can be removed from a recurrent state (Gated
DeltaNet). So recurrent states are copied before a block is read. After a rejection the copies are restored, and the
kept tokens are read again.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from sglang_dflash.engine.draft import pair
from sglang_dflash.engine.draft.record import Checkpoint


class Reading(NamedTuple):
    """Features of S tokens, and logits after each token or only after the last one."""

    logits_1SV: torch.Tensor  # [1, 1, V] if only the logits after the last token were computed
    features_1SC: torch.Tensor


class Undo(NamedTuple):
    """Data needed to undo a block: its tokens, and copies of the recurrent states before it."""

    ids_1N: torch.Tensor
    states: list[torch.Tensor]


NO_IMAGES: Mapping[str, torch.Tensor] = MappingProxyType({})
NORMS = ("norm", "embedding_norm", "norm_f")  # names of a decoder's final norm


def states_of(model: PreTrainedModel, **inputs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Run the model, and return its output, and the embeddings with every layer's output.

    Transformers returns the last layer's output after the final norm, and SGLang captures it before.
    """
    decoder, seen = model.get_decoder(), list[torch.Tensor]()
    children = dict(decoder.named_children())
    norm = next(children[name] for name in NORMS if name in children)
    handle = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        out = model(**inputs, output_hidden_states=True)
    finally:
        handle.remove()
    return out, (*out.hidden_states[:-1], seen[-1])


def target_features(hidden_states: Sequence[torch.Tensor], layer_ids: Sequence[int]) -> torch.Tensor:
    """Concatenate the outputs of the given layers, [..., C]; `hidden_states` starts with the embeddings."""
    return torch.cat([hidden_states[layer + 1] for layer in layer_ids], dim=-1)


def check_pair(draft: Checkpoint, target: PreTrainedModel) -> None:
    """Raise ValueError if the draft does not match the target."""
    text = target.config.get_text_config()
    pair.check_pair(
        draft,
        target.name_or_path or type(target).__name__,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        n_layers=text.num_hidden_layers,
        gives_last=True,
    )


class TargetReader:
    """Reader of one sequence with the target's cache. It can undo the last tokens of a block."""

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        """Create the cache.

        Raises:
            ValueError: the target's cache has layers that cannot be undone.
        """
        self.model = model
        self.layer_ids = layer_ids
        self.cache = DynamicCache(config=model.config)
        self.shift = 0  # position of the next token minus number of tokens; images take fewer positions than tokens
        kinds = {type(layer) for layer in self.cache.layers}
        unknown = kinds - {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer}
        if unknown or not kinds:
            names = ", ".join(sorted(kind.__name__ for kind in unknown))
            why = f"its cache has layers of type {names}" if names else "it has no cache"
            raise ValueError(
                f"{type(model).__name__} cannot take back rejected drafts, because {why}; give a target with full, "
                "sliding-window or recurrent layers"
            )
        self.recurrent = [layer for layer in self.cache.layers if isinstance(layer, LinearAttentionLayer)]
        self.attending = [layer for layer in self.cache.layers if isinstance(layer, DynamicLayer)]
        for layer in self.attending:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()  # needed to restore K and V that slid out of the window

    def read(self, ids_1S: torch.Tensor, images: Mapping[str, torch.Tensor] = NO_IMAGES) -> Reading:
        """Read S more tokens that will not be undone. Only the logits after the last token are computed.

        `images`: a processor's further outputs for a prompt with images. Such a prompt must be read first and whole.
        """
        reading = self._forward(ids_1S, 1, images)
        self._cut(0)
        return reading

    def read_block(self, ids_1N: torch.Tensor) -> tuple[Reading, Undo]:
        """Read a block, with logits after each token. Then the caller must call `keep` with the returned `Undo`."""
        undo = Undo(ids_1N, [state.clone() for state in self._states()])
        return self._forward(ids_1N, ids_1N.shape[1]), undo

    def keep(self, n: int, undo: Undo) -> None:
        """Undo all but the first `n` tokens of the last block."""
        N = undo.ids_1N.shape[1]
        if n == N or not self.recurrent:
            return self._cut(N - n)
        self._cut(N)
        for state, saved in zip(self._states(), undo.states, strict=True):
            state.copy_(saved)
        self.read(undo.ids_1N[:, :n])

    def _states(self) -> list[torch.Tensor]:
        """Return the tensors of the recurrent layers, in a fixed order."""
        kinds = (kind for layer in self.recurrent for kind in (layer.conv_states, layer.recurrent_states))
        return [state for kind in kinds for state in kind.values() if state is not None]

    def _forward(self, ids_1S: torch.Tensor, n_logits: int, images: Mapping[str, torch.Tensor] = NO_IMAGES) -> Reading:
        inputs = dict(images)
        if not images:
            # Positions are given, because Transformers would shift its own by the last images that the model has read.
            first = self.cache.get_seq_length() + self.shift
            inputs["position_ids"] = torch.arange(first, first + ids_1S.shape[1], device=ids_1S.device)[None]
        out, states = states_of(
            self.model, input_ids=ids_1S, past_key_values=self.cache, use_cache=True, logits_to_keep=n_logits, **inputs
        )
        if images:
            self.shift = int(out.rope_deltas)
        return Reading(out.logits, target_features(states, self.layer_ids))

    def _cut(self, n: int) -> None:
        """Drop keys and values of the last `n` tokens. Sliding layers also drop tokens outside their window."""
        for layer in self.attending:
            layer.crop(-n)


def stop_token_ids(target: PreTrainedModel) -> tuple[int, ...]:
    """Return the end tokens of the target's generation config, or () if it names none."""
    config = target.generation_config
    ids = config.eos_token_id if config is not None else None
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
