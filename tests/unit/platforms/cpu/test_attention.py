"""Paged attention on CPU must equal its definition, which computes one query and head at a time in fp64."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.platforms.cpu import attention
from sglang_dflash.platforms.cpu.attention import CpuAttentionBackend, consecutive

A, G, E, ROWS, WIDTH = 4, 2, 8, 6, 60
SLOTS = ROWS * WIDTH
SCALE = 0.3


class Pool:
    """A KV pool of one layer, and the table of each request's KV slots."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.k, self.v = torch.randn(SLOTS, G, E).to(dtype), torch.randn(SLOTS, G, E).to(dtype)
        self.req_to_token = torch.randperm(SLOTS).view(ROWS, WIDTH).int()

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(self, layer: object, where: object, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[where.loc], self.v[where.loc] = k, v


@pytest.fixture(params=["shuffled", "consecutive"])
def pool(request: pytest.FixtureRequest) -> Pool:
    torch.manual_seed(0)
    pool = Pool()
    if request.param == "consecutive":
        pool.req_to_token = torch.arange(SLOTS).view(ROWS, WIDTH).int()
    return pool


def backend_of(pool: Pool, **runner: object) -> CpuAttentionBackend:
    return CpuAttentionBackend(
        SimpleNamespace(**{"req_to_token_pool": pool, "token_to_kv_pool": pool, "use_mla_backend": False, **runner})
    )


def layer_of(window: int = -1, attn_type: AttentionType = AttentionType.DECODER, **other: object) -> SimpleNamespace:
    known = {"layer_id": 0, "tp_q_head_num": A, "tp_k_head_num": G, "qk_head_dim": E, "v_head_dim": E}
    plain = {"scaling": SCALE, "is_cross_attention": False, "logit_cap": 0.0, "k_scale_float": None}
    return SimpleNamespace(**known, **{**plain, **other}, sliding_window_size=window, attn_type=attn_type)


def batch_of(mode: ForwardMode, rows: list[int], **fields: object) -> SimpleNamespace:
    return SimpleNamespace(forward_mode=mode, req_pool_indices=torch.tensor(rows), out_cache_loc=None, **fields)


def one_by_one(pool: Pool, q_NAE: torch.Tensor, slots: list[int], first: int, sees) -> torch.Tensor:
    """Attend with queries at positions first, first + 1, ... The mask is `sees(query position, key position)`."""
    out = torch.zeros(q_NAE.shape, dtype=torch.float64)
    for n, head in torch.cartesian_prod(torch.arange(q_NAE.shape[0]), torch.arange(A)).tolist():
        visible = [slot for position, slot in enumerate(slots) if sees(first + n, position)]
        k, v = pool.k[visible, head * G // A].double(), pool.v[visible, head * G // A].double()
        out[n, head] = torch.softmax(k @ q_NAE[n, head].double() * SCALE, dim=0) @ v
    return out.flatten(1)


def test_only_consecutive_kv_slots_are_a_slice():
    for slots in ([7], [3, 4, 5]):
        assert consecutive(torch.tensor(slots).int()) == slice(slots[0], slots[-1] + 1)
    for slots in ([3, 5, 4, 6], [4, 3], [3, 3, 5], [3, 5]):
        assert consecutive(torch.tensor(slots)).tolist() == slots


MASKS = {
    "causal": (layer_of(), lambda q, k: k <= q),
    "causal window": (layer_of(window=3), lambda q, k: q - 3 <= k <= q),
    "whole block": (layer_of(attn_type=AttentionType.ENCODER_ONLY), lambda q, k: True),
    "whole block, window": (layer_of(window=3, attn_type=AttentionType.ENCODER_ONLY), lambda q, k: abs(q - k) <= 3),
}


@pytest.fixture(params=MASKS)
def masked(request: pytest.FixtureRequest) -> tuple[SimpleNamespace, object]:
    return MASKS[request.param]


@pytest.mark.parametrize("max_rectangle", [attention.MAX_RECTANGLE, 40, 1], ids=["together", "some", "one each"])
@pytest.mark.parametrize("lengths", [[1], [17], [5, 1, 30, 12]], ids=str)
def test_decode(pool, masked, lengths, max_rectangle, monkeypatch):
    monkeypatch.setattr(attention, "MAX_RECTANGLE", max_rectangle)
    layer, sees = masked
    rows, q = [4, 0, 3, 1][: len(lengths)], torch.randn(len(lengths), A * E)
    batch, backend = batch_of(ForwardMode.DECODE, rows, seq_lens=torch.tensor(lengths)), backend_of(pool)
    backend.init_forward_metadata(batch)
    got = backend.forward(q, None, None, layer, batch)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        slots = pool.req_to_token[row, :length].tolist()
        want = one_by_one(pool, q[i].view(1, A, E), slots, length - 1, sees)
        torch.testing.assert_close(got[i : i + 1].double(), want, atol=1e-5, rtol=1e-5)


def block_batch(rows: list[int], prefix_lens: list[int], n_block: int, **spec: object) -> SimpleNamespace:
    spec_info = SimpleNamespace(**{"custom_mask": None, "ragged_verify_layout": None, **spec}, draft_token_num=n_block)
    return batch_of(ForwardMode.TARGET_VERIFY, rows, seq_lens=torch.tensor(prefix_lens), spec_info=spec_info)


@pytest.mark.parametrize("max_rectangle", [attention.MAX_RECTANGLE, 40])
@pytest.mark.parametrize(("prefix_lens", "n_block"), [([7], 1), ([0], 5), ([20, 0, 3], 8)], ids=str)
def test_block(pool, masked, prefix_lens, n_block, max_rectangle, monkeypatch):
    """`MASKS` has the masks of verify (causal) and of draft layers (whole block), each also with a window."""
    monkeypatch.setattr(attention, "MAX_RECTANGLE", max_rectangle)
    layer, sees = masked
    rows = [4, 0, 3][: len(prefix_lens)]
    batch, backend = block_batch(rows, prefix_lens, n_block), backend_of(pool)
    block_slots = torch.stack([pool.req_to_token[r, p : p + n_block] for r, p in zip(rows, prefix_lens, strict=True)])
    batch.out_cache_loc = block_slots.flatten().long()
    q, k, v = torch.randn(block_slots.numel(), A * E), *torch.randn(2, block_slots.numel(), G, E)
    backend.init_forward_metadata(batch)
    got = backend.forward(q, k, v, layer, batch)
    assert torch.equal(pool.k[batch.out_cache_loc[-n_block:]], k[-n_block:])
    for i, (row, prefix_len) in enumerate(zip(rows, prefix_lens, strict=True)):
        slots = pool.req_to_token[row, : prefix_len + n_block].tolist()
        cells = slice(i * n_block, (i + 1) * n_block)
        want = one_by_one(pool, q[cells].view(n_block, A, E), slots, prefix_len, sees)
        torch.testing.assert_close(got[cells].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_queries", [attention.MAX_QUERIES, 4])
@pytest.mark.parametrize("parts", [[(0, 9)], [(0, 1), (13, 6), (2, 11)]], ids=str)
def test_extend(pool, masked, parts, max_queries, monkeypatch):
    monkeypatch.setattr(attention, "MAX_QUERIES", max_queries)
    layer, sees = masked
    rows, (prefix_lens, new_lens) = [4, 0, 3][: len(parts)], zip(*parts, strict=True)
    lengths = {"extend_prefix_lens": torch.tensor(prefix_lens), "extend_seq_lens": torch.tensor(new_lens)}
    batch, backend = batch_of(ForwardMode.EXTEND, rows, **lengths), backend_of(pool)
    q = torch.randn(sum(new_lens), A * E)
    backend.init_forward_metadata(batch)
    got = backend.forward(q, None, None, layer, batch, save_kv_cache=False)
    for row, n_prefix, n_new, q_NF, got_NF in zip(
        rows, prefix_lens, new_lens, q.split(new_lens), got.split(new_lens), strict=True
    ):
        slots = pool.req_to_token[row, : n_prefix + n_new].tolist()
        want = one_by_one(pool, q_NF.view(n_new, A, E), slots, n_prefix, sees)
        torch.testing.assert_close(got_NF.double(), want, atol=1e-5, rtol=1e-5)


def test_requests_do_not_affect_their_neighbours(pool):
    """The longer neighbour must not change a result. The short request's KV slots after its last token hold NaN."""
    q, backend = torch.randn(2, A * E), backend_of(pool)
    batch = batch_of(ForwardMode.DECODE, [4, 0], seq_lens=torch.tensor([5, 30]))
    pool.req_to_token[4], pool.req_to_token[0] = torch.arange(WIDTH), torch.arange(100, 100 + WIDTH)
    pool.k[5:100], pool.v[5:100] = torch.nan, torch.nan  # row 4's slots after its own five tokens
    backend.init_forward_metadata(batch)
    together = backend.forward(q, None, None, layer_of(), batch)
    alone = batch_of(ForwardMode.DECODE, [4], seq_lens=torch.tensor([5]))
    backend.init_forward_metadata(alone)
    torch.testing.assert_close(backend.forward(q[:1], None, None, layer_of(), alone), together[:1], atol=1e-6, rtol=0)


def test_a_half_precision_cache_is_read_in_the_queries_type():
    pool, q = Pool(torch.bfloat16), torch.randn(1, A * E)
    batch, backend = batch_of(ForwardMode.DECODE, [2], seq_lens=torch.tensor([9])), backend_of(pool)
    backend.init_forward_metadata(batch)
    got = backend.forward(q, None, None, layer_of(), batch)
    want = one_by_one(pool, q.view(1, A, E), pool.req_to_token[2, :9].tolist(), 8, lambda q, k: True)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_an_idle_batch_has_no_output_rows(pool):
    backend, batch = backend_of(pool), batch_of(ForwardMode.IDLE, [])
    backend.init_forward_metadata(batch)
    assert backend.forward(torch.zeros(0, A * E), None, None, layer_of(), batch).shape == (0, A * E)


@pytest.mark.parametrize(
    ("layer", "arguments", "name"),
    [
        ({"logit_cap": 30.0}, {}, "logit_cap"),
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({"k_scale_float": 0.5}, {}, "k_scale"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}, "DECODER_BIDIRECTIONAL"),
        ({}, {"sinks": torch.zeros(A)}, "sinks"),
    ],
)
def test_undefined_layers_are_refused_by_name(pool, layer, arguments, name):
    backend, batch = backend_of(pool), batch_of(ForwardMode.DECODE, [2], seq_lens=torch.tensor([9]))
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=name):
        backend.forward(torch.zeros(1, A * E), None, None, layer_of(**layer), batch, **arguments)


def test_undefined_batches_are_refused_by_name(pool):
    for name, batch in {
        "custom_mask": block_batch([0], [3], 2, custom_mask=torch.ones(2)),
        "ragged_verify_layout": block_batch([0], [3], 2, ragged_verify_layout=object()),
        "DRAFT_EXTEND_V2": batch_of(ForwardMode.DRAFT_EXTEND_V2, [0]),
    }.items():
        with pytest.raises(NotImplementedError, match=name):
            backend_of(pool).init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="MLA"):
        backend_of(pool, use_mla_backend=True)
