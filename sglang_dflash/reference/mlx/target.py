"""Model of mlx-lm as DFlash uses it: reads tokens, returns features, and can undo rejected tokens.

Calls of layers are recorded while the model reads. The outputs of some layers are the features. K and V of rejected
tokens are dropped, but no token can be removed from a recurrent state. So the recurrent state before the block is
restored, and the layer is called again with the kept rows of its recorded input. MLX is lazy, so this second call
computes the projections and the recurrent state, but not the unused output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from sglang_dflash.errors import NotSupported

PREFILL_CHUNK = 2048  # tokens of a prompt per forward, as in mlx-lm


class Call(NamedTuple):
    """Recorded call of a layer."""

    rows: mx.array  # the layer's input, [1, S, H]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: mx.array


@contextmanager
def recorded(layers: Mapping[int, nn.Module]) -> Iterator[dict[int, Call]]:
    """Yield a dict that gets the last call of each layer, by the layer's index.

    Inside the context the layers' classes are patched, because Python looks up `__call__` in the class.
    """
    calls: dict[int, Call] = {}
    places = {id(layer): i for i, layer in layers.items()}
    plain: dict[Any, Any] = {kind: kind.__call__ for kind in map(type, layers.values())}

    def watched(call: Any) -> Any:
        def __call__(layer: nn.Module, rows: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            out = call(layer, rows, *args, **kwargs)
            if id(layer) in places:
                calls[places[id(layer)]] = Call(rows, args, kwargs, out)
            return out

        return __call__

    for kind, call in plain.items():
        kind.__call__ = watched(call)
    try:
        yield calls
    finally:
        for kind, call in plain.items():
            kind.__call__ = call


class MLXTarget:
    """Reader of one sequence with the target's cache. It can undo the last tokens of the last read.

    Args:
        layer_ids: layers whose outputs are features.
    Raises:
        NotSupported: a layer has a cache that cannot be undone.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        self.model, self.layer_ids = model, layer_ids
        # A rotating cache overwrites K and V that left the window, so rejected tokens could not be undone. With a plain
        # cache instead, the attention mask limits the window.
        made = make_prompt_cache(model)
        self.caches = [KVCache() if isinstance(cache, RotatingKVCache) else cache for cache in made]
        unknown = {type(cache).__name__ for cache in self.caches} - {KVCache.__name__, ArraysCache.__name__}
        if unknown:
            raise NotSupported(
                f"{type(model).__module__} cannot take back rejected drafts, because its cache has layers of type "
                f"{', '.join(sorted(unknown))}; give a target with full, sliding-window or recurrent layers"
            )
        self.recurrent = [i for i, cache in enumerate(self.caches) if isinstance(cache, ArraysCache)]
        # Only these layers are recorded, because inputs and outputs for a prompt's chunk are large.
        self.watched = {i: model.layers[i] for i in {*layer_ids, *self.recurrent}}
        self.n_rows = 0  # number of tokens of the last read
        self.before: dict[int, list[Any]] = {}  # arrays of recurrent layers before the last read
        self.calls: dict[int, Call] = {}

    def read(self, tokens_S: mx.array) -> tuple[mx.array, mx.array]:
        """Read S more tokens; return logits after each, [S, V], and features, [S, C]."""
        self.n_rows = tokens_S.shape[0]
        self.before = {i: list(self.caches[i].cache) for i in self.recurrent}
        with recorded(self.watched) as self.calls:
            logits_1SV = self.model(tokens_S[None], cache=self.caches)
        features_1SC = mx.concatenate([self.calls[i].out for i in self.layer_ids], axis=-1)
        return logits_1SV[0], features_1SC[0]

    def keep(self, n: int) -> None:
        """Undo all but the first `n` tokens of the last read."""
        if n == self.n_rows:
            return
        for cache in self.caches:
            if isinstance(cache, KVCache):
                cache.trim(self.n_rows - n)
        for i in self.recurrent:
            self.caches[i].cache = list(self.before[i])
            call = self.calls[i]
            self.watched[i](call.rows[:, :n], *call.args, **call.kwargs)
