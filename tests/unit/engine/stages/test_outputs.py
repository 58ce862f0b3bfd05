"""Hidden states and sampling masks must be copied to the host only if requested, in the scheduler's layout."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput, SamplingMaskOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from torch import nn

from sglang_dflash.engine.stages import outputs
from sglang_dflash.engine.stages.outputs import Features, HiddenStates
from sglang_dflash.engine.stages.sampling import slots_of
from sglang_dflash.errors import NotSupported

N = 4


@pytest.fixture(params=[CaptureHiddenMode.NULL, CaptureHiddenMode.LAST, CaptureHiddenMode.FULL])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CaptureHiddenMode:
    """Set and return which hidden states of a prompt the server may return: none, the last, or all."""
    monkeypatch.setattr(outputs, "get_server_return_hidden_states_mode", lambda: request.param)
    return request.param


def batch_of(**fields: Any) -> Any:
    return SimpleNamespace(**{"return_hidden_states": False, "extend_lens": [2, 1, 3], "device": "cpu"} | fields)


def output_of(masks: SamplingMaskOutput | None = None) -> LogitsProcessorOutput:
    return LogitsProcessorOutput(None, sampling_mask_output=masks)


class Target(nn.ModuleList):
    """A target made of submodules. The error names this class."""


def logits_processor() -> LogitsProcessor:
    processor = LogitsProcessor.__new__(LogitsProcessor)
    nn.Module.__init__(processor)
    processor.keep_last_hidden_states = False
    return processor


def test_the_target_keeps_hidden_states_if_the_server_returns_them(mode: CaptureHiddenMode) -> None:
    processors = [logits_processor() for _ in range(2)]  # a nested model may have its own processor
    target = Target([Target([processors[0]]), processors[1]])
    assert type(outputs.hidden_states_of(target, features=True)) is Features
    assert [one.keep_last_hidden_states for one in processors] == [False] * 2
    assert type(outputs.hidden_states_of(target, features=False)) is HiddenStates
    assert [one.keep_last_hidden_states for one in processors] == [mode != CaptureHiddenMode.NULL] * 2


def test_a_target_without_hidden_states_is_refused_if_the_server_returns_them(mode: CaptureHiddenMode) -> None:
    outputs.hidden_states_of(Target(), features=True)
    if mode == CaptureHiddenMode.NULL:
        outputs.hidden_states_of(Target(), features=False)
        return
    with pytest.raises(NotSupported, match=r"^Target computes its logits without .*; leave out --enable-return-hidden"):
        outputs.hidden_states_of(Target(), features=False)


@pytest.mark.parametrize("returned", [HiddenStates(), Features()], ids=["final", "features"])
def test_hidden_states_are_not_copied_unless_requested(returned: HiddenStates, mode: CaptureHiddenMode) -> None:
    assert returned.copied(batch_of(), output_of()) is None
    assert returned.of_prompts(batch_of(), output_of()) is None


def test_the_rows_of_a_step_are_a_copy() -> None:
    rows_TH, features_TC = torch.randn(2 * N, 3), torch.randn(2 * N, 6)
    output = LogitsProcessorOutput(None, hidden_states=features_TC, last_hidden_states=rows_TH)
    batch = batch_of(return_hidden_states=True)
    found = [returned.copied(batch, output) for returned in (HiddenStates(), Features())]
    before = rows_TH.clone(), features_TC.clone()
    rows_TH.zero_()  # as the next graph replay overwrites the rows
    features_TC.zero_()
    assert all(map(torch.equal, found, before))


def test_prompts_return_only_their_last_rows_in_last_mode(mode: CaptureHiddenMode) -> None:
    if mode == CaptureHiddenMode.NULL:
        pytest.skip("no request can ask for hidden states")
    rows_TH = torch.arange(6.0)[:, None]
    output = LogitsProcessorOutput(None, hidden_states=rows_TH + 10, last_hidden_states=rows_TH)
    wanted = [1, 2, 5] if mode == CaptureHiddenMode.LAST else [0, 1, 2, 3, 4, 5]
    for returned, first in ((HiddenStates(), 0), (Features(), 10)):
        found = returned.of_prompts(batch_of(return_hidden_states=True), output)
        assert (found - first).flatten().tolist() == wanted


def test_slots_of_requests() -> None:
    assert slots_of(None, N) is None
    slots = slots_of(torch.tensor([0, 2]), N)
    assert slots.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_masks_are_split_by_request_and_slot() -> None:
    """Requests 0 and 2 of three need masks. Only request 2 needs all log-probabilities of its mask."""
    row_T = torch.arange(2 * N)
    masks = SamplingMaskOutput(
        token_ids=torch.stack([row_T, row_T + 100], dim=1),
        lengths=row_T,
        selected_logprobs=row_T.float(),
        support_logprobs=torch.stack([row_T[N:], row_T[N:]], dim=1).float(),
        statuses=row_T,
    )
    output = output_of(masks=masks)
    batch = batch_of(sampling_info=SimpleNamespace(sampling_mask_batch_indices=torch.tensor([0, 2])))
    outputs.sampling_masks_by_block(batch, output, torch.tensor([1, 2, 3]), N)
    split = output.sampling_mask_output
    assert split.num_accept_tokens.tolist() == [1, 3]
    assert split.token_ids[1, 2].tolist() == [6, 106]
    for rows in (split.lengths, split.selected_logprobs, split.statuses):
        assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert split.support_logprobs[0, :, 0].tolist() == [4, 5, 6, 7]


def test_without_masks_nothing_happens() -> None:
    output = output_of()
    outputs.sampling_masks_by_block(batch_of(), output, torch.ones(1), N)
    assert output.sampling_mask_output is None


def test_experts_have_a_row_for_every_verified_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured for batches of a multiple of 4 requests here, so 6 requests may have 8 rows per slot."""
    monkeypatch.setattr(outputs, "get_cuda_graph_max_batch_size", lambda n: -(-n // 4) * 4)
    create = outputs.experts_of_blocks(widest=16)
    assert create(dict, max_running_requests=6, num_tokens=512) == {"max_running_requests": 128, "num_tokens": 512}
