import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dflash_kernels.penalise import Asked, penalise_, penalise_ref, penalise_triton

from tests.fixtures.sequential import penalised

INF = float("inf")


def asked(*requests: dict, device: str = "cpu") -> Asked:
    """Build `Asked`, as in `asked({"index": 1, "row": 0, "presence": 0.5, "stop": [3]})`. Other fields are neutral."""
    longest = max([1, *(len(request.get("stop", [])) for request in requests)])

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([request.get(name, default) for request in requests], dtype=dtype, device=device)

    stops = [[*request.get("stop", []), *[-1] * longest][:longest] for request in requests]
    return Asked(
        column("index", 0, torch.int64), column("row", 0, torch.int64), column("frequency", 0.0, torch.float32),
        column("presence", 0.0, torch.float32), column("repetition", 1.0, torch.float32),
        column("min_new", 0, torch.int64), torch.tensor(stops, dtype=torch.int64, device=device).view(-1, longest),
    )  # fmt: skip


def test_hand_worked():
    """In request 1, token 0 was output twice before, and token 1 is drafted twice. Request 0 has no penalties."""
    logits_BNV = torch.tensor([[1.0, -2.0, 3.0, -4.0]]).repeat(2, 3, 1)
    tokens_BN = torch.tensor([[9, 2, 2], [9, 1, 1]])
    counts_RV = torch.tensor([[7, 7, 7, 7], [2, 0, 0, 0]], dtype=torch.int32)
    request = {"index": 1, "row": 1, "frequency": 0.25, "presence": 0.5, "repetition": 2.0, "min_new": 6, "stop": [3]}
    penalise_(logits_BNV, tokens_BN, torch.tensor([4]), counts_RV, asked(request))
    assert logits_BNV[0].tolist() == [[1.0, -2.0, 3.0, -4.0]] * 3
    assert logits_BNV[1].tolist() == [
        [0.0, -2.0, 3.0, -INF],  # 1 - 0.25 * 2 - 0.5; 4 tokens were output, fewer than min_new 6: no stop token
        [0.0, -5.5, 3.0, -INF],  # (-2 - 0.25 - 0.5) * 2
        [0.0, -6.0, 3.0, -4.0],  # (-2 - 0.25 * 2 - 0.5) * 2; 6 tokens with the drafts: the stop token is allowed
    ]


def test_rows_of_a_padded_vocabulary_may_be_strided():
    padded_BNV = torch.randn(2, 3, 8)
    args = torch.tensor([[0, 1, 2]] * 2), torch.tensor([1]), torch.ones(1, 5, dtype=torch.int32)
    request = {"index": 1, "frequency": 1.0}
    want_BNV = padded_BNV[:, :, :5].clone()
    penalise_(want_BNV, *args, asked(request))
    penalise_(padded_BNV[:, :, :5], *args, asked(request))
    assert torch.equal(padded_BNV[:, :, :5], want_BNV)
    with pytest.raises(ValueError, match="must be contiguous"):
        penalise_(torch.randn(2, 5, 3).transpose(1, 2), *args, asked(request))


PENALTY = st.sampled_from([0.0, 0.5, -0.5, 2.0, -2.0])


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_definition_is_the_sequential_one(data):
    """Compare with penalties that are recounted at each slot from the output and the drafts up to this slot."""
    V, n_tokens = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 5))
    texts = data.draw(st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=8), min_size=1, max_size=4))
    B = len(texts)
    tokens_BN = torch.randint(0, V, (B, n_tokens))
    tokens_BN[:, 0] = torch.tensor([text[-1] for text in texts])
    asking = data.draw(st.lists(st.sampled_from(range(B)), unique=True))
    requests = [
        {
            "index": b, "row": b, "frequency": data.draw(PENALTY), "presence": data.draw(PENALTY),
            "repetition": data.draw(st.sampled_from([1.0, 0.5, 1.5, 2.0])), "min_new": data.draw(st.integers(0, 9)),
            "stop": data.draw(st.lists(st.integers(0, V - 1), unique=True, max_size=2)),
        }
        for b in asking
    ]  # fmt: skip
    counts_RV = torch.stack([torch.tensor(text).bincount(minlength=V) for text in texts]).int()
    logits_BNV = torch.randn(B, n_tokens, V)
    want_BNV = logits_BNV.clone()
    for request in requests:
        b, by_sglangs_names = request["index"], {"min_new_tokens": request["min_new"]}
        by_sglangs_names |= {f"{name}_penalty": request[name] for name in ("frequency", "presence", "repetition")}
        for slot in range(n_tokens):
            text = [*texts[b], *tokens_BN[b, 1 : slot + 1].tolist()]
            want_BNV[b, slot] = torch.tensor(penalised(logits_BNV[b, slot], text, by_sglangs_names, request["stop"]))
    n_output_P = torch.tensor([len(texts[b]) for b in asking], dtype=torch.int64)
    penalise_ref(logits_BNV, tokens_BN, n_output_P, counts_RV, asked(*requests))
    torch.testing.assert_close(logits_BNV, want_BNV)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "P", "N", "V"), [(3, 0, 4, 9), (1, 1, 1, 1), (3, 2, 16, 1500), (5, 5, 32, 1024)])
def test_kernel_is_the_definition(B, P, N, V, dtype, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter truncates to bf16")
    torch.manual_seed(B + V)
    requests = [
        {
            "index": b, "row": B - b, "frequency": 0.3 * b, "presence": 0.4 - 0.3 * b, "repetition": 1.0 + 0.2 * b,
            "min_new": 7 + 2 * b, "stop": [0, V // 2][: b + 1],
        }
        for b in torch.randperm(B)[:P].tolist()
    ]  # fmt: skip
    padded_BNV = torch.randn(B, N, V + 3, device=device, dtype=dtype)
    tokens_BN = torch.randint(0, V, (B, N), device=device)
    n_output_P = torch.full((P,), 6, device=device)
    counts_RV = torch.randint(0, 3, (B + 1, V), dtype=torch.int32, device=device)
    args = tokens_BN, n_output_P, counts_RV, asked(*requests, device=device)
    want_BNV = padded_BNV.clone()[:, :, :V]
    penalise_ref(want_BNV, *args)
    penalise_triton(padded_BNV[:, :, :V], *args)
    torch.testing.assert_close(padded_BNV[:, :, :V], want_BNV)
