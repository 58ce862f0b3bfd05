"""Matrix products with fp32 weights in oneDNN's packed layout.

PyTorch's own fp32 product (MKL) of two token rows takes twice as long as the product of one row. oneDNN reads a weight
that was packed once. For all products of SmolLM2, on two cores with AVX2, it takes 0.71 of MKL's time with one row, and
0.52 with 8 rows. A row's result does not depend on the number of rows (tested with AVX2). So packed
products add no difference between a verified block and single decode steps. The plain weights stay in memory too.

Dimension key: T tokens, K inputs, N outputs.
"""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

logger = logging.getLogger(__name__)

# Smaller weights are faster unpacked, because a call of oneDNN's product costs 30 us more.
MIN_ELEMENTS = 2**18
# Number of rows for which oneDNN selects the layout. With 1, results of single rows would differ from a block's.
ROWS = 64


class Packed:
    """Product with the packed copy of a layer's weight, fp32 [N, K]."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the layer's weight. SGLang calls this again when a checkpoint from disk has replaced the weight."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight.default(layer.weight, ROWS)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [..., K] times the weight, plus the bias [N]: fp32 [..., N]."""
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, bias, "none", [], "")


class PackedLinear(Packed, UnquantizedLinearMethod):
    """`quant_method` of a linear layer."""


class PackedHead(Packed, UnquantizedEmbeddingMethod):
    """`quant_method` of a head. The module may also be the embedding, which reads the plain weight."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [..., K], in any dtype, times the weight, plus the bias [N]: fp32 [..., N]."""
        return super().apply(layer, x.float(), bias)


KINDS: dict[type, type[Packed]] = {UnquantizedLinearMethod: PackedLinear, UnquantizedEmbeddingMethod: PackedHead}


def pack(model: torch.nn.Module) -> None:
    """Pack the large fp32 weights of the linear layers and of the head of `model`."""
    if not torch.backends.mkldnn.is_available():
        return
    head, n_bytes = dict(model.named_children()).get("lm_head"), 0
    layer: Any
    for layer in model.modules():
        kind = KINDS.get(type(vars(layer).get("quant_method")))
        if kind is None or (kind is PackedHead and layer is not head):
            continue
        if (weight := layer.weight).dtype == torch.float32 and weight.numel() > MIN_ELEMENTS:
            layer.quant_method = kind(layer)
            n_bytes += weight.nbytes
    if n_bytes:
        logger.info("%s: %.0f MB of packed weights", type(model).__name__, n_bytes / 1e6)


def pack_again(model: torch.nn.Module) -> None:
    """Replace every packed weight of `model` by a packed copy of the current weight."""
    for layer in model.modules():
        if isinstance(method := vars(layer).get("quant_method"), Packed):
            method.process_weights_after_loading(layer)


@cache  # called for every model, wraps once
def install() -> None:
    """Wrap SGLang's weight updates by tensor, group and IPC, and its reset of weights, to pack the weights again.

    The plugin hooks some of these methods too. The result does not depend on the order.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils.weight_checker import WeightChecker

    for name in ("load_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc"):
        update = packing_again(vars(WeightUpdater)[name], lambda updater: updater.get_model())
        setattr(WeightUpdater, name, update)
    reset = packing_again(WeightChecker._reset_tensors, lambda checker: checker._get_model())
    WeightChecker._reset_tensors = reset


def packing_again(update: Callable[..., Any], model_of: Callable[[Any], torch.nn.Module]) -> Callable[..., Any]:
    """Wrap a method that updates weights. After each call, even a failed one, `model_of(self)` is packed again."""

    @wraps(update)
    def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return update(self, *args, **kwargs)
        finally:
            pack_again(model_of(self))

    return updated
