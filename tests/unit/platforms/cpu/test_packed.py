"""Packed weights: products, invariance to the number of rows, and weight updates."""

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

from sglang_dflash.platforms.cpu import packed

N, K = 960, 576  # the projection to q, k and v of SmolLM2-135M


class Layer(torch.nn.Module):
    """Stand-in for a layer of SGLang: a weight and a quant_method."""

    def __init__(self, method: object, n_outputs: int = N, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(n_outputs, K, dtype=dtype), requires_grad=False)
        self.quant_method = method


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {
            "embed": Layer(UnquantizedEmbeddingMethod()),
            "proj": Layer(UnquantizedLinearMethod()),
            "small": Layer(UnquantizedLinearMethod(), n_outputs=8),
            "bf16": Layer(UnquantizedLinearMethod(), dtype=torch.bfloat16),
            "lm_head": Layer(UnquantizedEmbeddingMethod()),
        }
    )


def test_large_fp32_layers_and_the_head_are_packed(model) -> None:
    packed.pack(model)
    methods = {name: layer.quant_method for name, layer in model.items()}
    assert {name for name, method in methods.items() if isinstance(method, packed.Packed)} == {"proj", "lm_head"}


@pytest.mark.parametrize("kind", [packed.PackedLinear, packed.PackedHead])
@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (2, 9)])
def test_products_equal_the_definition(model, kind: type, shape: tuple[int, ...]) -> None:
    """The definition sums in fp64. Rows may be strided."""
    layer, x, bias = model["proj"], torch.randn(*shape, 2 * K)[..., ::2], torch.randn(N)
    want = x.double() @ layer.weight.double().T + bias
    torch.testing.assert_close(kind(layer).apply(layer, x, bias), want.float(), rtol=1e-5, atol=1e-4)


def test_a_head_casts_its_rows(model) -> None:
    head, x = model["lm_head"], torch.randn(2, K).bfloat16()
    torch.testing.assert_close(packed.PackedHead(head).apply(head, x), x.float() @ head.weight.T, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="oneDNN's AVX2 kernels are examined")
def test_a_row_does_not_depend_on_the_number_of_rows(model) -> None:
    layer = model["proj"]
    method, x = packed.PackedLinear(layer), torch.randn(128, K)
    want = method.apply(layer, x)
    for n_rows in (1, 2, 3, 5, 8, 9, 17, 64, 100):
        assert torch.equal(method.apply(layer, x[:n_rows]), want[:n_rows]), n_rows


@pytest.mark.parametrize("fails", [False, True])
def test_updated_weights_are_packed_again(model, fails: bool) -> None:
    """A failed update may have replaced some weights, so the weights are packed again."""
    packed.pack(model)
    layer, x = model["proj"], torch.randn(2, K)

    def update(updater: object) -> None:
        layer.weight.data.copy_(torch.ones(N, K))
        if fails:
            raise ValueError("the next tensor does not fit")

    updated = packed.packing_again(update, lambda updater: model)
    if fails:
        with pytest.raises(ValueError, match="does not fit"):
            updated(None)
    else:
        updated(None)
    torch.testing.assert_close(layer.quant_method.apply(layer, x), x.sum(-1, keepdim=True).expand(-1, N))
