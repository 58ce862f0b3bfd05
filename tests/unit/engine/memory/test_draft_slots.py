"""Ring slots, simulated without a server: a block must see the last tokens of its own request, and no other tokens."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.engine.memory.draft_kv import READ_AGAIN, leave_the_end
from sglang_dflash.engine.memory.slots import ExactRingSlots, RingSlots, rings_for
from sglang_dflash.engine.step import Block, Plan
from tests.fixtures.rings import make_rings

N_ROWS, LONGEST = 5, 400
CPU = torch.device("cpu")


class World:
    """Simulation of a request table, of a ring pool that records the last write per slot, and of requests."""

    def __init__(self, window: int, block: int, page: int, seed: int, kind: type[RingSlots] = RingSlots) -> None:
        self.window, self.block, self.page, self.random = window, block, page, Random(seed)
        self.ring = make_rings(torch.zeros(N_ROWS, LONGEST), window=window, widest=block, page=page, kind=kind)
        self.exact = kind is ExactRingSlots
        self.written: list[Any] = [None] * (N_ROWS * self.ring.size)  # slot -> (request, position)
        self.live: dict[int, SimpleNamespace] = {}  # row -> request
        self.n_requests = 0

    def begin(self, rows: list[int]) -> None:
        """Start requests in `rows`, some with a cached prefix, and read their prompts in one or more chunks.

        Half of the chunks are mixed: each also reads one token of the running requests.
        """
        running = list(self.live)
        for row in rows:
            self.ring.requests.req_generation[row] += 1
            prefix = self.random.choice([0, 0, self.random.randrange(1, 9)]) * max(self.page, 8)
            end = prefix + self.random.choice([1, 5, self.block, self.window, 2 * self.ring.size + 3])
            self.n_requests += 1
            self.live[row] = SimpleNamespace(name=self.n_requests, first=prefix, read=prefix, end=end)
        while waiting := [row for row in rows if self.live[row].read < self.live[row].end]:
            chunks = []
            for row in waiting:
                request = self.live[row]
                longest = self.random.choice([self.page * 8, LONGEST])
                chunks.append((row, request.read, min(longest, request.end - request.read)))
                request.read += chunks[-1][-1]
            mixed = [row for row in running if self.random.random() < 0.5]
            self.read_prompts(*chunks, *((row, self.live[row].end, 1) for row in mixed), n_running=len(mixed))
            for row in mixed:
                self.live[row].end += 1

    def read_prompts(self, *chunks: tuple[int, int, int], n_running: int = 0) -> None:
        """Read a batch of prompt chunks, each given as row, start and length. The last are of running requests."""
        rows, starts, lengths = zip(*chunks, strict=True)
        # Rows must come from the batch, because a running request that has ended since has none.
        reqs = [SimpleNamespace(kv=SimpleNamespace(req_pool_idx=None)) for _ in rows]
        running = reqs[len(reqs) - n_running :]
        batch = SimpleNamespace(
            reqs=reqs,
            decoding_reqs=running,
            prefix_lens=starts,
            extend_lens=lengths,
            req_pool_indices_cpu=torch.tensor(rows),
        )
        kept = self.ring.of_prompt(batch, CPU)
        packed = [(self.live[row].name, start + i) for row, start, n in chunks for i in range(n)]
        if kept.rows_T is not None:
            packed = [packed[row] for row in kept.rows_T.tolist()]
        assert [position for _, position in packed] == kept.positions_T.tolist()
        slots = kept.slots_T.tolist()
        assert len(set(slots)) == len(slots), "two rows of a prompt in one slot: which of them remains is undefined"
        for slot, what in zip(slots, packed, strict=True):
            self.written[slot] = what

    def step(self, rows: list[int]) -> None:
        """Run one decode step: check the context of each request's block, then commit a random number of its tokens."""
        prefix_len_B = torch.tensor([self.live[row].end for row in rows])
        positions_BN = prefix_len_B[:, None] + torch.arange(self.block)
        # The host's bound is the exact length if the backend needs it, else the scheduler's reservation, which may be
        # larger.
        bound_B = prefix_len_B + self.block * (1 if self.exact else self.random.randint(1, 2))
        end_B = prefix_len_B + self.block
        block = Block(positions_BN, positions_BN, positions_BN, end_B, bound_B, int(bound_B.sum()), kv=None)
        plan = Plan(block, block, prefix_len_B, torch.tensor(rows), torch.tensor(rows))
        seen = self.ring.seen(plan, block)
        assert seen.bound_sum == int(seen.bound_B_cpu.sum())
        slots_BN = self.ring.of_block(plan, block).view(len(rows), -1).tolist()
        assert seen.kv.write_virtual.view(len(rows), -1).tolist() == slots_BN
        for i, row in enumerate(rows):
            self.check(row, int(seen.len_B[i]), int(seen.bound_B_cpu[i]), slots_BN[i])
            n_kept = self.random.randint(1, self.block)
            for j in range(n_kept):
                self.written[slots_BN[i][j]] = (self.live[row].name, self.live[row].end + j)
            self.live[row].end += n_kept

    def check(self, row: int, n_seen: int, bound: int, block_slots: list[int]) -> None:
        request = self.live[row]
        slots = self.ring.table[row, : n_seen + self.block].tolist()
        context = slots[:n_seen]
        assert [self.written[slot] for slot in context] == [
            (request.name, position) for position in range(request.end - n_seen, request.end)
        ]
        assert n_seen >= min(self.window, request.end - request.first)
        assert n_seen <= self.window + self.page - 1
        assert self.ring.is_cut(row, request.end) == (n_seen < min(self.window, request.end))
        assert n_seen + self.block <= bound <= len(self.ring.table[row]), "a backend would read past the row"
        assert not self.exact or n_seen + self.block == bound
        assert slots[n_seen:] == block_slots
        assert not set(context) & set(block_slots), "the block overwrites what it sees"
        # Backends may read only the first entry of each page, so the slots of a page must be consecutive.
        assert all(slot % self.page == column % self.page for column, slot in enumerate(slots))
        assert all(slots[i] == slots[i - i % self.page] + i % self.page for i in range(len(slots)))


@pytest.mark.parametrize(("window", "block", "page"), [(8, 4, 1), (20, 8, 1), (64, 16, 1), (24, 8, 16), (64, 16, 16)])
@pytest.mark.parametrize("kind", [RingSlots, ExactRingSlots])
def test_a_block_sees_its_own_window_and_nothing_else(window, block, page, kind):
    for seed in range(4):
        world = World(window, block, page, seed, kind)
        for _ in range(80):
            free = [row for row in range(1, N_ROWS) if row not in world.live]
            if free and world.random.random() < 0.4:
                world.begin(world.random.sample(free, world.random.randint(1, len(free))))
            rows = [row for row in world.live if world.random.random() < 0.8]
            if rows:
                world.step(rows)
            for row in [row for row in world.live if world.random.random() < 0.08]:
                del world.live[row]
        assert world.n_requests > 8


@pytest.mark.parametrize(("needs", "kind"), [(True, ExactRingSlots), (False, RingSlots)])
def test_the_backend_selects_the_kind_of_ring(needs, kind):
    assert rings_for(SimpleNamespace(attn_backend=SimpleNamespace(needs_cpu_seq_lens=needs))) is kind


def test_a_gap_before_a_prompt_restarts_the_ring():
    """A session's next chat turn has the same table row. The ring may lack tokens before the prompt: here 8 to 10.

    Then the request's context in the ring begins with the new prompt, at 11.
    """
    world = World(window=8, block=4, page=1, seed=0)
    world.live[1] = SimpleNamespace(name=1, first=0, read=6, end=6)
    world.read_prompts((1, 0, 6))
    assert world.ring.first_R[1] == 0
    world.read_prompts((1, 6, 2))
    assert world.ring.first_R[1] == 0
    world.read_prompts((1, 11, 2))
    assert world.ring.first_R[1] == 11


@pytest.mark.parametrize(
    ("longest", "input_len", "left"),
    [(999, 1000, 1000 - READ_AGAIN), (100, 1000, 100), (READ_AGAIN - 1, READ_AGAIN, 0), (9, 10, 0)],
)
def test_the_end_of_a_prompt_is_read_again(longest, input_len, left):
    assert leave_the_end(longest, None, input_len) == left
