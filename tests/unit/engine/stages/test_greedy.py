"""Greedy verify with logits sharded over ranks must find SGLang's tokens. Ranks can gather SGLang's full logits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from torch import nn

from sglang_dflash.engine.draft.target_ends import TargetEnds
from sglang_dflash.engine.stages.greedy import Shards, Whole, verified_logits, why_whole
from sglang_dflash.engine.stages.ranks import Groups, OneGroup
from tests.fixtures.thread_ranks import ThreadRanks

ROWS, H, V = 6, 4, 21  # each of two ranks holds 11 rows of the head; the last row of the second is padding
N_RANKS, N_EACH = 2, 11


class Rank:
    """One rank's logits processor and its shard of the target's head."""

    def __init__(self, group: ThreadRanks, rank: int, weight_VH: torch.Tensor, *, scale: float | None = None) -> None:
        self.processor = LogitsProcessor.__new__(LogitsProcessor)
        nn.Module.__init__(self.processor)
        facts = {
            "vocab_size": V, "logit_scale": scale, "final_logit_softcapping": None, "defer_verify_gather": False,
            "do_tensor_parallel_all_gather": True, "do_tensor_parallel_all_gather_dp_attn": False,
            "use_attn_tp_group": False, "use_tp_lm_head_all_to_all": False, "use_fp32_lm_head": False,
            "use_fp32_lm_head_output": False, "rl_on_policy_target": None, "_logits_gatherer": group.all_gather,
        }  # fmt: skip
        vars(self.processor).update(facts)
        real = weight_VH[rank * N_EACH : (rank + 1) * N_EACH]
        padding = weight_VH.new_full((N_EACH - len(real), H), 100.0)
        self.head = nn.Module()
        self.head.weight = nn.Parameter(torch.cat([real, padding]))
        self.head.org_vocab_size = V
        self.ends = TargetEnds(nn.Identity(), self.head, len(real), rank * N_EACH, cast(Any, group))
        shared = GraphSharedOutput(device=torch.device("cpu"), max_rows=ROWS + 2)
        self.buffer = shared.get_logits_buffer(V, rows=ROWS + 2)
        self.runner: Any = SimpleNamespace(
            model=nn.ModuleList([self.processor]),
            graph_shared_output=shared,
            model_config=SimpleNamespace(vocab_size=V),
        )

    def forward(self, hidden_TH: torch.Tensor, mode: ForwardMode, *, captured: bool) -> torch.Tensor:
        """Return the logits of SGLang's logits processor; `captured`: in the buffer that captured graphs share."""
        buffer = self.buffer[: len(hidden_TH)] if captured else None
        return self.processor._get_logits(hidden_TH, self.head, LogitsMetadata(mode, next_token_logits_buffer=buffer))


def hidden_and_head(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and a head. In row 0 tokens of different ranks tie, in row 1 tokens of the same rank."""
    torch.manual_seed(0)
    weight_VH = torch.randn(V, H).to(dtype)
    weight_VH[3] *= 4
    weight_VH[14] = weight_VH[3]
    weight_VH[17] *= 5
    weight_VH[18] = weight_VH[17]
    hidden_TH = torch.randn(ROWS, H).to(dtype)
    hidden_TH[0], hidden_TH[1] = weight_VH[3], weight_VH[17]
    return hidden_TH, weight_VH


def on_ranks(weight_VH: torch.Tensor, run: Callable[[Rank, Any], Any], **options: Any) -> tuple[list[Any], ThreadRanks]:
    """Call `run` with the `Rank` and its `verified_logits` on each rank. Return the results and the group of ranks."""
    group = ThreadRanks(N_RANKS)

    def on_rank(rank: int) -> Any:
        one = Rank(group, rank, weight_VH, **options)
        return run(one, verified_logits(one.runner, one.ends, OneGroup()))

    return group.run(on_rank), group


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
CAPTURED = pytest.mark.parametrize("captured", [True, False])
VERIFY = ForwardMode.TARGET_VERIFY


@pytest.mark.parametrize("mode", [VERIFY, ForwardMode.DECODE], ids=str)  # a step of one token is a decode step
@CAPTURED
@DTYPES
def test_ranks_find_the_argmax_from_two_numbers_per_row(dtype, captured, mode):
    """The lowest id wins ties and padding never wins, as with gathered logits."""
    hidden_TH, weight_VH = hidden_and_head(dtype)
    found, group = on_ranks(
        weight_VH, lambda one, shards: shards.likeliest(one.forward(hidden_TH, mode, captured=captured))
    )
    whole_T = (hidden_TH @ weight_VH.T).float().argmax(dim=-1)
    assert [token_T.tolist() for token_T in found] == [whole_T.tolist()] * N_RANKS
    assert whole_T[:2].tolist() == [3, 17]
    assert group.n_gathered == N_RANKS * 2 * ROWS


@pytest.mark.parametrize("scale", [None, 0.25])
@CAPTURED
@DTYPES
def test_whole_logits_equal_sglangs(dtype, captured, scale):
    hidden_TH, weight_VH = hidden_and_head(dtype)
    plain = ThreadRanks(N_RANKS)
    plain_TV, *_ = plain.run(
        lambda rank: Rank(plain, rank, weight_VH, scale=scale).forward(hidden_TH, VERIFY, captured=captured)
    )
    found, _ = on_ranks(
        weight_VH, lambda one, shards: shards.whole(one.forward(hidden_TH, VERIFY, captured=captured)), scale=scale
    )
    for whole_TV in found:
        assert whole_TV.dtype == plain_TV.dtype == torch.float32
        assert torch.equal(whole_TV, plain_TV)
        assert whole_TV.shape == (ROWS, V)


def test_captured_shards_and_logits_share_sglangs_buffer():
    """Every captured graph keeps its output tensor. If graphs did not share one, each batch size would add memory."""
    hidden_TH, weight_VH = hidden_and_head(torch.bfloat16)

    def run(one: Rank, shards: Any) -> None:
        shard_TV = one.forward(hidden_TH, VERIFY, captured=True)
        assert (shard_TV.shape, shard_TV.dtype) == ((ROWS, N_EACH), torch.bfloat16)
        assert shard_TV.data_ptr() == shards.whole(shard_TV).data_ptr() == one.buffer.data_ptr()

    on_ranks(weight_VH, run)


def test_a_batch_larger_than_the_buffer_has_memory_of_its_own():
    hidden_TH, weight_VH = hidden_and_head(torch.float32)
    hidden_TH = hidden_TH.repeat(2, 1)

    def run(one: Rank, shards: Any) -> torch.Tensor:
        whole_TV = shards.whole(one.forward(hidden_TH, VERIFY, captured=False))
        assert not one.buffer.any()
        return whole_TV

    for whole_TV in on_ranks(weight_VH, run)[0]:
        torch.testing.assert_close(whole_TV, hidden_TH @ weight_VH.T)


def test_prompts_end_with_gathered_logits():
    hidden_TH, weight_VH = hidden_and_head(torch.float32)
    for whole_TV in on_ranks(weight_VH, lambda one, _: one.forward(hidden_TH, ForwardMode.EXTEND, captured=False))[0]:
        torch.testing.assert_close(whole_TV, hidden_TH @ weight_VH.T)


def test_nan_is_sanitized_in_shards_as_in_full_logits(monkeypatch):
    """A NaN logit counts as minus infinity. Padding columns keep their NaN, because SGLang's check never reads them."""
    monkeypatch.setenv("SGLANG_SANITIZE_NAN_LOGITS", "1")
    logits_TV = torch.tensor([[float("nan"), -3.0, -2.0, float("nan")], [float("nan")] * 3 + [-float("inf")]])
    want_T = Whole().likeliest(logits_TV.clone())
    group = ThreadRanks(N_RANKS)

    def on_rank(rank: int) -> tuple[list[int], torch.Tensor]:
        shards = Shards.__new__(Shards)
        shards.ends = TargetEnds(nn.Identity(), None, 2, 2 * rank, cast(Any, group))
        shard_TV = torch.cat([logits_TV[:, 2 * rank : 2 * rank + 2], torch.full((2, 1), float("nan"))], dim=1)
        return shards.likeliest(shard_TV).tolist(), shard_TV

    for found, shard_TV in group.run(on_rank):
        assert found == want_T.tolist() == [2, 0]
        assert shard_TV[:, 2].isnan().all()


def test_an_unsharded_head_keeps_whole_logits():
    one = Rank(ThreadRanks(1), 0, torch.zeros(V, H))
    kind = verified_logits(one.runner, one.ends._replace(tp_group=None), OneGroup())
    assert type(kind) is Whole
    assert "_gather_softcap_fused" not in vars(one.processor)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"final_logit_softcapping": 30.0}, "the soft cap can round"),
        ({"use_attn_tp_group": True}, "the head's ranks are not those"),
        ({"do_tensor_parallel_all_gather": False}, "the head's ranks are not those"),
        ({"vocab_size": V - 1}, "vocabulary differs"),
        ({}, ""),
    ],
)
def test_unsupported_processors_keep_the_full_gather(change, why, caplog):
    caplog.set_level("INFO")
    one = Rank(ThreadRanks(N_RANKS), 0, torch.zeros(V, H))
    vars(one.processor).update(change)
    kind = verified_logits(one.runner, one.ends, OneGroup())
    assert (type(kind) is Whole) == bool(why)
    assert why in caplog.text
    assert ("verify gathers whole logits, also for greedy requests" in caplog.text) == bool(why)


def test_data_parallel_attention_and_two_processors_keep_the_gather():
    one = Rank(ThreadRanks(N_RANKS), 0, torch.zeros(V, H))
    assert "2 LogitsProcessor modules, not one" in why_whole([one.processor] * 2, one.ends, OneGroup())
    assert "attention is data parallel" in why_whole([one.processor], one.ends, Groups())
