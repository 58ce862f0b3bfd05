"""fp8 copy of the target's head: logits, weight updates, and heads that cannot be copied."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from sglang_dflash.engine.draft import head_copy
from sglang_dflash.engine.draft.head_copy import Fp8Head
from sglang_dflash.engine.draft.target_ends import TargetEnds, best_candidates, likeliest, target_ends, with_copy
from sglang_dflash.engine.memory.sizes import fp8_head_bytes
from sglang_dflash.errors import NotSupported

V, H, REAL = 48, 32, 40
E4M3 = sorted({float(x) for x in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() if x == x})


class Head(nn.Module):
    """SGLang's unquantized head on one rank. Rows from `REAL` on are padding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.quant_method: Any = UnquantizedEmbeddingMethod()
        self.quant_method.create_weights(self, H, [V], H, V, dtype)
        self.change(0)
        self.tp_size, self.org_vocab_size = 1, REAL
        self.shard_indices = SimpleNamespace(num_org_elements=REAL, org_vocab_start_index=0)

    def change(self, seed: int) -> None:
        """Write random weights in place, as SGLang's loaders do."""
        random = torch.Generator().manual_seed(seed)
        self.weight.data.copy_(torch.randn(V, H, generator=random) * torch.logspace(-4, 2, V)[:, None])


def nearest(row: torch.Tensor) -> list[float]:
    """Return the row rounded to e4m3, by searching all e4m3 values. No element lies midway between two values."""
    scale = max(abs(float(x)) for x in row) / 448
    return [min(E4M3, key=lambda e: abs(e - float(x) / scale)) * scale for x in row]


def test_logits_are_products_of_rounded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have magnitudes of 1e-4 to 1e2, so each needs its own scale. The last chunk of rows is shorter."""
    monkeypatch.setattr(head_copy, "CHUNK", 7)
    head, hidden_TH = Head(), torch.randn(5, H, generator=torch.Generator().manual_seed(1))
    logits_TV = Fp8Head(head).logits(hidden_TH)
    rows, hidden = ([nearest(row) for row in tensor] for tensor in (head.weight, hidden_TH))
    expected_TV = torch.tensor([[sum(a * b for a, b in zip(h, row, strict=True)) for row in rows] for h in hidden])
    torch.testing.assert_close(logits_TV, expected_TV, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits_TV, hidden_TH @ head.weight.T, rtol=1e-3), "nothing was rounded"


def test_a_row_of_zeros_has_logits_of_zero() -> None:
    head = Head()
    head.weight.data[3] = 0
    logits_TV = Fp8Head(head).logits(torch.cat([torch.ones(1, H), torch.zeros(1, H)]))
    assert logits_TV[0, 3] == 0
    assert logits_TV[1].tolist() == [0] * V


def test_the_copy_has_the_computed_size() -> None:
    copy = Fp8Head(Head(torch.bfloat16))
    assert copy.rows_DH.nbytes + copy.scale_D1.nbytes == fp8_head_bytes(V, H)


def test_drafts_come_from_the_copy_without_its_padding() -> None:
    head = Head()
    head.weight.data[REAL:] *= 100
    copy, hidden_TH = Fp8Head(head), torch.randn(6, H)
    ends = TargetEnds(nn.Identity(), head, REAL, 0, cast(Any, None), copy=copy)
    head.weight.data.zero_()  # only the copy keeps the weights
    logits_TV = copy.logits(hidden_TH)[:, :REAL]
    assert torch.equal(likeliest(hidden_TH, ends), logits_TV.argmax(-1))
    given = list[bool]()
    ends = ends._replace(top_k=lambda x_TV, k: given.append(x_TV.is_contiguous()) or x_TV.topk(k))
    tokens_TK, best_TK = best_candidates(hidden_TH, ends, 4)
    assert given == [True], "FlashInfer's top-k refuses other logits"
    assert torch.equal(best_TK, logits_TV.topk(4).values)
    assert torch.equal(tokens_TK, logits_TV.topk(4).indices)


def test_the_copy_follows_an_update_in_place() -> None:
    """In SGLang every load of weights ends with `postprocess_weights`. Captured graphs read the copy's fixed memory."""
    model = nn.Module()
    model.lm_head = head = Head()
    copy, hidden_TH = Fp8Head(head), torch.randn(3, H)
    addresses, before_TV = (copy.rows_DH.data_ptr(), copy.scale_D1.data_ptr()), copy.logits(hidden_TH)
    head.change(1)
    assert torch.equal(copy.logits(hidden_TH), before_TV)
    DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
    assert (copy.rows_DH.data_ptr(), copy.scale_D1.data_ptr()) == addresses
    assert torch.equal(copy.logits(hidden_TH), Fp8Head(head).logits(hidden_TH))
    assert not torch.equal(copy.logits(hidden_TH), before_TV)


class OnGpu(torch.Tensor):
    is_cuda = True


def test_a_gpu_multiplies_by_sglangs_fp8_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's kernel requires a column-major weight [H, V], a scale per column, and bf16 or fp16 input."""
    copy, hidden_TH = Fp8Head(Head()), torch.randn(3, H)

    def product(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16
        assert (weight.shape, weight.stride(), weight.dtype) == ((H, V), (1, H), torch.float8_e4m3fn)
        assert (weight_scale.shape, weight_scale.dtype) == ((V, 1), torch.float32)
        return x.float() @ (weight.float() * weight_scale.T)

    monkeypatch.setattr(head_copy, "apply_fp8_linear", product)
    found_TV = copy.logits(hidden_TH.as_subclass(OnGpu)).as_subclass(torch.Tensor)
    # On a CPU the copy rounds hidden states to e4m3 (3 mantissa bits, error at most 2**-4). `product` does not.
    assert (found_TV - copy.logits(hidden_TH)).norm() < 2**-4 * found_TV.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_logits_equal_cpu_logits() -> None:
    copy, hidden_TH = Fp8Head(Head(torch.bfloat16)), torch.randn(5, H, dtype=torch.bfloat16)
    on_gpu = Fp8Head(Head(torch.bfloat16).cuda())
    expected_TV = copy.logits(hidden_TH)
    torch.testing.assert_close(on_gpu.logits(hidden_TH.cuda()).cpu().float(), expected_TV, rtol=1e-2, atol=1e-2)


def test_an_fp8_copy_of_another_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{target_ends.__module__}.get_parallel", lambda: SimpleNamespace(attn_dp_enabled=False))
    embedding, quantized = nn.Embedding(5, 4), Head()
    del quantized.weight
    for head, kind in ((embedding, "a plain torch embedding"), (quantized, "quantized")):
        model = SimpleNamespace(lm_head=head, get_input_embeddings=lambda: embedding)
        with pytest.raises(NotSupported, match=f"^SGLANG_DFLASH_DRAFT_HEAD=fp8 cannot copy .* is {kind}; set SGLANG"):
            target_ends(model, fp8_head=True)
    plain = target_ends(SimpleNamespace(lm_head=Head(), get_input_embeddings=lambda: embedding), fp8_head=True)
    assert isinstance(with_copy(plain, None, fp8=True).copy, Fp8Head)
