from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.cpu import mamba_state
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import GdnState
from sglang_dflash.stages import state
from sglang_dflash.stages.state import InPlaceState, crossing_step, decoding_one_token, make_state, why_whole_blocks


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 16)), min_size=1, max_size=5), st.integers(16, 96))
def test_crossing_step_is_the_last_slot_that_completes_an_interval(requests, interval):
    """The definition, token by token: after slot i, prefix + i + 1 tokens are committed."""
    want = [max((i for i in range(n) if (prefix + i + 1) % interval == 0), default=-1) for prefix, n in requests]
    prefix_len_B = torch.tensor([prefix for prefix, _ in requests])
    n_committed_B = torch.tensor([n for _, n in requests], dtype=torch.int32)
    assert crossing_step(prefix_len_B, n_committed_B, interval).tolist() == want


class LinearBackend:
    """SGLang's, as far as a block of one token needs it."""

    forward_metadata = SimpleNamespace(mamba_cache_indices=torch.tensor([3, 1, 2, 0]))  # the last one is padding

    def forward_extend(self, *, forward_batch, layer):
        return "prompt", layer

    def forward_decode(self, *, forward_batch, layer):
        return "decode", layer

    def _translate_mamba_indices(self, indices):
        return indices


@pytest.mark.parametrize(
    ("mode", "way"), [(ForwardMode.TARGET_VERIFY, "decode"), (ForwardMode.EXTEND, "prompt")], ids=str
)
def test_a_block_of_one_token_is_decoded_and_prompts_are_not(mode, way):
    forward = decoding_one_token(LinearBackend())
    assert forward(forward_batch=SimpleNamespace(forward_mode=mode), layer=7) == (way, 7)


@pytest.mark.parametrize("tracked", [True, False])
def test_in_place_commit_copies_the_states_that_completed_an_interval(tracked, monkeypatch):
    monkeypatch.setattr(state, "track_interval", lambda page_size: 64)
    monkeypatch.setattr(state, "track_mamba_states_all_layers", mamba_state.track_mamba_states_all_layers)
    conv, temporal = torch.randn(2, 9, 4, 3), torch.randn(2, 9, 2, 5, 5)  # layers, slots, ...
    want = conv.clone(), temporal.clone()
    for pool in want if tracked else ():
        pool[:, 8] = pool[:, 1]  # of the second request, whose 64th token this was
    cache = SimpleNamespace(conv=[conv], temporal=temporal)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache)),
        attn_backend=SimpleNamespace(linear_attn_backend=LinearBackend()),
    )
    batch = SimpleNamespace(
        mamba_track_indices=torch.tensor([6, 8, 7]) if tracked else None, tree_cache=SimpleNamespace(page_size=1)
    )
    plan = SimpleNamespace(prefix_len_B=torch.tensor([64, 63, 62]), n_requests=3)
    InPlaceState(SimpleNamespace(model_runner=runner)).commit(batch, plan, torch.ones(3, dtype=torch.int32))
    assert torch.equal(conv, want[0])
    assert torch.equal(temporal, want[1])


@pytest.mark.parametrize(
    ("recurrent", "gated_delta_net", "narrow"), [(False, False, True), (True, True, True), (True, False, False)]
)
def test_only_some_recurrent_targets_verify_less_than_the_block(recurrent, gated_delta_net, narrow, monkeypatch):
    monkeypatch.setattr(state, "mambaish_config", lambda config: recurrent or None)
    monkeypatch.setattr(state, "hybrid_gdn_config", lambda config: gated_delta_net or None)
    assert (why_whole_blocks(None) == "") is narrow


@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("pool", ["short_conv_pool", "ngram_pool"])
def test_states_of_per_layer_embeddings_are_not_folded(pool, width, monkeypatch):
    monkeypatch.setattr(state, "mambaish_config", lambda config: True)
    monkeypatch.setattr(state, "hybrid_gdn_config", lambda config: True)
    off, on = SimpleNamespace(enabled=False), SimpleNamespace(enabled=True)
    pools = SimpleNamespace(**({"short_conv_pool": off, "ngram_pool": off} | {pool: on}))
    worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=None, req_to_token_pool=pools))
    with pytest.raises(NotSupported, match=r"per-layer embeddings; set SGLANG_DFLASH_GDN_STATE=snapshot"):
        make_state(worker, GdnState.FOLD, width)
