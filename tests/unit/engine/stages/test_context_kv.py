"""Context K/V writes: immediate, or deferred until a draft reads them.

A late row holds the features of a token whose context K/V are not written yet.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.engine.stages.context_kv import LATE_ROWS, ContextKV, LateRows
from sglang_dflash.engine.stages.stages import with_methods
from sglang_dflash.engine.worker import DFlashWorker
from tests.fixtures.rings import make_rings

BLOCK, N_SLOTS, N_REQUESTS = 4, 24, 3


class Draft:
    """A draft of one layer whose K and V are the features themselves."""

    def __init__(self):
        attention = SimpleNamespace(
            k_norm=SimpleNamespace(variance_epsilon=1e-6),
            rotary_emb=SimpleNamespace(cos_sin_cache=torch.tensor([[1.0, 0.0]]).repeat(64, 1)),  # no rotation
        )
        self.attentions, self.layers, self.k_norm_LE = [attention], [None], None
        self.fc, self.lilicorr = SimpleNamespace(weight=torch.zeros(2, 2)), None
        self.n_calls = 0

    def context_kv(self, features_TC, last=None):
        self.n_calls += 1
        self.last = last
        return features_TC.view(-1, 1, 1, 2), features_TC.view(-1, 1, 1, 2)


class SameSlots:
    """Stand-in for `SharedSlots`: a block uses the target's KV slots. A prompt's slots are in `batch.slots_T`."""

    def of_block(self, plan, block):
        return block.slots_BN.view(-1)

    def of_prompt(self, batch, device):
        n_rows_B = vars(batch).get("extend_lens", [len(batch.slots_T)])
        positions_T = torch.arange(len(batch.slots_T))
        return SimpleNamespace(rows_T=None, positions_T=positions_T, slots_T=batch.slots_T, n_rows_B=n_rows_B)


def make_context(slots=None, *, n_slots=N_SLOTS, n_requests=N_REQUESTS, may_wait=True):
    k, v = torch.zeros(n_slots, 1, 2), torch.zeros(n_slots, 1, 2)
    pool = SimpleNamespace(get_key_buffer=lambda i: k, get_value_buffer=lambda i: v)
    runner = SimpleNamespace(token_to_kv_pool=pool)
    slots = slots or SameSlots()
    return ContextKV(Draft(), runner, slots, n_requests=n_requests, block_size=BLOCK, may_wait=may_wait), k


def step(slots_BN, *, drafts):
    slots_BN = torch.tensor(slots_BN)
    block = SimpleNamespace(slots_BN=slots_BN, positions_BN=torch.zeros_like(slots_BN))
    return SimpleNamespace(verified=block, drafted=block if drafts else None, rows_B=torch.arange(len(slots_BN)))


def features(n, value):
    return torch.full((n, 2), float(value))


def one_token(context, rids, slots, value):
    """Append a step without drafts, whose features all equal `value`."""
    buffer = features(len(rids), value)
    context.append(rids, step([[slot] for slot in slots], drafts=False), buffer, torch.ones(len(rids)).int())
    buffer.fill_(-1)  # in serving the features are in a graph's buffer, which the next forward overwrites


def test_steps_without_drafts_are_written_together_before_the_next_draft():
    context, k = make_context()
    for i in range(3):
        one_token(context, ["a", "b"], [2 * i, 2 * i + 1], value=i + 1)
    assert context.model.n_calls == 0
    assert not k.any()
    context.before_draft(step([[6], [7]], drafts=False))
    assert not k.any(), "a step without drafts does not read context K/V"
    context.before_draft(step([[6, 7], [8, 9]], drafts=True))
    assert context.model.n_calls == 1
    assert k[:6, 0, 0].tolist() == [1, 1, 2, 2, 3, 3]


def test_nothing_is_late_where_ended_requests_slots_are_copied_out():
    context, k = make_context(may_wait=False)
    one_token(context, ["a", "b"], [0, 1], value=1)
    assert k[:2, 0, 0].tolist() == [1, 1]
    assert context.late.n_rows == 0


def test_at_most_one_block_of_a_request_is_late():
    """A ring has KV slots for the window and one block. With more late rows a request would use a KV slot twice."""
    context, k = make_context()
    for i in range(BLOCK + 1):
        one_token(context, ["a"], [i], value=i + 1)
    assert k[:, 0, 0].tolist() == [1, 2, 3, 4] + [0] * 20


def test_all_running_requests_can_be_late_at_once():
    n_requests = LATE_ROWS + 1
    context, k = make_context(n_slots=n_requests, n_requests=n_requests)
    one_token(context, [str(i) for i in range(n_requests)], list(range(n_requests)), value=1)
    context.before_draft(step([[0]], drafts=True))
    assert k[:, 0, 0].tolist() == [1] * n_requests


def test_only_kept_tokens_of_a_block_are_written():
    context, k = make_context()
    plan = step([[0, 1, 2, 3], [4, 5, 6, 7]], drafts=True)
    context.append(["a", "b"], plan, features(8, 1), torch.tensor([1, 3]).int())
    assert k[:8, 0, 0].tolist() == [1, 0, 0, 0, 1, 1, 1, 0]


def test_write_all_writes_every_row():
    """A dry run calls `write_all` to compile the kernel of prompts. It writes even rows that `append` would defer."""
    for may_wait in (True, False):
        context, k = make_context(may_wait=may_wait)
        context.write_all(step([[0, 1], [4, 5]], drafts=False), features(4, 3))
        assert k[:6, 0, 0].tolist() == [3, 3, 0, 0, 3, 3]


def test_rings_get_the_end_of_a_prompt_and_the_next_block():
    """A ring has 12 slots, 8 for the window and 4 for a block. The ring of table row 1 has slots 12 to 23."""
    rings = make_rings(torch.zeros(2, 64), window=8, widest=BLOCK)
    context, k = make_context(rings)
    prompt = SimpleNamespace(
        reqs=["a"], decoding_reqs=None, prefix_lens=[0], extend_lens=[20], req_pool_indices_cpu=torch.tensor([1])
    )
    context.append_prompt(prompt, torch.arange(20.0)[:, None].expand(20, 2).contiguous())
    assert k[:, 0, 0].tolist() == [0] * 12 + [12, 13, 14, 15, 16, 17, 18, 19] + [0] * 4
    block = SimpleNamespace(slots_BN=torch.tensor([[0, 1, 2, 3]]), positions_BN=torch.tensor([[20, 21, 22, 23]]))
    plan = SimpleNamespace(verified=block, drafted=block, rows_B=torch.tensor([1]))
    context.append(["a"], plan, features(4, 99), torch.tensor([2]).int())
    assert k[:, 0, 0].tolist() == [0] * 12 + [12, 13, 14, 15, 16, 17, 18, 19] + [99, 99, 0, 0]


def test_late_rows_stay_within_their_allotment():
    late = LateRows(n_rows=5, n_steps=100, like_TC=torch.zeros(1, 2))
    two = torch.zeros(2, dtype=torch.int64)
    for _ in range(2):
        assert late.fits(["a", "b"])
        late.add(["a", "b"], two, features(2, 1), two, two)
    assert not late.fits(["a", "b"])
    assert late.n_rows == 4


@pytest.mark.parametrize("reader", ["decode", "prompt"])
def test_late_rows_do_not_overwrite_a_slots_next_owner(reader):
    context, k = make_context()
    one_token(context, ["a", "b"], [3, 4], value=1)
    # "a" has ended. Its slot 3 now belongs to "b", for the next token, or to the prompt of a new request.
    if reader == "decode":
        one_token(context, ["b"], [3], value=2)
        context.before_draft(step([[5, 6]], drafts=True))
    else:
        context.append_prompt(SimpleNamespace(slots_T=torch.tensor([3])), features(1, 2))
    assert k[3:5, 0, 0].tolist() == [2, 1]


def test_clearing_the_cache_drops_late_rows():
    """Clearing the cache frees the slots of late rows, so by the next step other requests may have them."""
    context, k = make_context()
    worker = DFlashWorker.__new__(DFlashWorker)
    worker.stages = SimpleNamespace(context_kv=context)
    one_token(context, ["a"], [3], value=1)
    worker.clear_cache_pool()
    context.before_draft(step([[5, 6]], drafts=True))
    assert not k.any()
    one_token(context, ["b"], [4], value=2)
    context.before_draft(step([[5, 6]], drafts=True))
    assert k[:6, 0, 0].tolist() == [0, 0, 0, 0, 2, 0]


requests = st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True).map(sorted)


@given(st.lists(st.tuples(requests, st.sampled_from(["one", "block", "prompt"])), max_size=30), st.randoms())
def test_deferred_writes_equal_immediate_writes(events, random):
    context, k = make_context()
    want = torch.zeros(N_SLOTS)
    for value, (rids, kind) in enumerate(events, start=1):
        mine = torch.cat(context.late.slots).tolist() if context.late.slots and context.late.rids == rids else []
        others = [slot for slot in range(N_SLOTS) if slot not in mine]  # tokens of one request never share a KV slot
        slots = random.sample(others, len(rids) * (1 if kind == "one" else 2))
        want[slots] = float(value)
        if kind == "one":
            one_token(context, rids, slots, value)
            continue
        if kind == "prompt":
            context.append_prompt(SimpleNamespace(slots_T=torch.tensor(slots)), features(len(slots), value))
        else:
            plan = step([slots[2 * i : 2 * i + 2] for i in range(len(rids))], drafts=True)
            context.before_draft(plan)
            context.append(rids, plan, features(len(slots), value), torch.full((len(rids),), 2).int())
        assert torch.equal(k[:, 0, 0], want)


@pytest.mark.parametrize("is_measured", [False, True])
def test_the_last_kept_token_of_each_request_is_named(is_measured):
    """A LiLiCorr draft keeps its context: of a block's last kept token, of late rows' last step, and of prompts.

    With metrics the stage is a duplicate whose `append` is the original's.
    """
    context, _ = make_context()
    context.keeps_last = True
    if is_measured:
        context = with_methods(context, append=context.append)
    rows = torch.tensor([6, 2])
    plan = step([[0, 1, 2, 3], [4, 5, 6, 7]], drafts=True)
    plan.rows_B = rows
    plan.verified.tokens_BN = plan.verified.slots_BN
    context.append(["a", "b"], plan, features(8, 1), torch.tensor([3, 1], dtype=torch.int32))
    assert context.model.last.rows_B is rows
    assert context.model.last.at_B.tolist() == [2, 4]
    for slots in ([[8], [9]], [[10], [11]]):
        plan = step(slots, drafts=False)
        plan.rows_B = rows
        context.append(["a", "b"], plan, features(2, 1), torch.ones(2).int())
    context.before_draft(step([[12], [13]], drafts=True))
    assert context.model.last.rows_B is rows
    assert context.model.last.at_B.tolist() == [2, 3]
    batch = SimpleNamespace(slots_T=torch.arange(12, 17), req_pool_indices=rows, extend_lens=[2, 3])
    context.append_prompt(batch, features(5, 1))
    assert context.model.last.at_B.tolist() == [1, 4]
