"""Memory copies without a GPU: within a KV pool, to the host cache and back, to another process, and pinned memory."""

import pytest
import torch

from sglang_dflash.platforms.cpu import host_cache, kv
from sglang_dflash.platforms.cpu.pinned import MAKERS, torch_with
from sglang_dflash.platforms.cpu.transfer import TransferEngine, memory


def test_slots_of_a_block():
    table = torch.randint(0, 99, (5, 20), dtype=torch.int32)
    starts, ends = torch.tensor([[0, 7], [4, 11]], dtype=torch.int32)
    rows, block = {"req_pool_indices": torch.tensor([3, 1]), "batch_size": 2}, {"draft_token_num": 4}
    got = kv.block_cache_locs(
        req_to_token=table, start_offset=starts, end_offset=ends, **rows, **block, device=torch.device("cpu")
    )
    assert got.dtype == torch.int64
    assert got.tolist() == [*table[3, 0:4].tolist(), *table[1, 7:11].tolist()]


@pytest.mark.parametrize("ranges", [[(3, 5)], [(0, 4), (2, 2), (7, 8)], [(1, 1)]], ids=str)
def test_new_slots_are_written_into_the_rows(ranges: list[tuple[int, int]]):
    table = torch.full((5, 10), -1, dtype=torch.int32)
    want, rows, next_slot = table.clone(), [4, 0, 2][: len(ranges)], 50
    for row, (start, end) in zip(rows, ranges, strict=True):
        for position in range(start, end):
            want[row, position] = next_slot
            next_slot += 1
    starts, ends = torch.tensor(ranges, dtype=torch.int32).unbind(1)
    kv.assign_req_to_token_pool_func(torch.tensor(rows), table, starts, ends, torch.arange(50, 60), len(ranges))
    assert torch.equal(table, want)


def test_overlapping_rows_move_in_every_buffer():
    wide, narrow = torch.randn(6, 2, 4), torch.randn(6, 3).bfloat16()
    want_wide, want_narrow = wide.clone(), narrow.clone()
    for want in (want_wide, want_narrow):
        want[[1, 2]] = want[[0, 1]]
    strides = torch.tensor([wide[0].nbytes, narrow[0].nbytes])
    pointers = torch.tensor([wide.data_ptr(), narrow.data_ptr()], dtype=torch.uint64)
    kv.copy_all_layer_kv_cache_func(pointers, strides, torch.tensor([1, 2, 5]), torch.tensor([0, 1, 3]), 2, 128, {})
    assert torch.equal(wide, want_wide)
    assert torch.equal(narrow, want_narrow)


N_LAYERS, N_SLOTS, WIDTH = 3, 24, 5


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("by_pages", [False, True])
def test_kv_survive_a_round_trip_to_the_host(by_pages: bool, page_size: int) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, N_LAYERS, N_SLOTS, WIDTH)
    device = [*keys, *values]
    n_host = 32
    inside = (n_host // page_size, N_LAYERS, page_size) if by_pages else (N_LAYERS, n_host)
    host = torch.zeros(2, *inside, WIDTH)
    source, there, back = torch.arange(4, 12), torch.arange(16, 24), torch.arange(12, 20)
    before = torch.stack(device)
    if by_pages:
        host_cache.transfer_kv_all_layer_direct_lf_pf(device, list(host), source, there, page_size)
    else:
        host_cache.transfer_kv_direct(device, [*host[0], *host[1]], source, there, page_size)
    for layer in range(N_LAYERS):
        targets = [keys[layer], values[layer]]
        if by_pages:
            host_cache.transfer_kv_per_layer_direct_pf_lf(list(host), targets, there, back, layer, page_size)
        else:
            host_cache.transfer_kv_direct(list(host[:, layer]), targets, there, back, page_size)
    assert torch.equal(torch.stack(device)[:, back], before[:, source])
    assert torch.equal(torch.stack(device)[:, :12], before[:, :12])


def engine() -> tuple[TransferEngine, str]:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made, f"127.0.0.1:{made.get_rpc_port()}"


def test_parts_are_written_to_their_addresses() -> None:
    here, (there, address) = torch.arange(6, dtype=torch.int32), engine()
    got = torch.full((9,), -1, dtype=torch.int32)
    assert there.register_memory(got.data_ptr(), got.nbytes) == 0
    first, second = here.data_ptr(), here[4:].data_ptr()
    at = got[6:].data_ptr(), got[1:].data_ptr()
    assert TransferEngine().batch_transfer_sync_write(address, [first, second], list(at), [12, 8]) == 0
    assert got.tolist() == [-1, 4, 5, -1, -1, -1, 0, 1, 2]


def test_unregistered_memory_is_not_written() -> None:
    here, got, (there, address) = torch.ones(4), torch.zeros(4), engine()
    there.register_memory(got.data_ptr(), got.nbytes)
    sender = TransferEngine()
    assert sender.transfer_sync_write(address, here.data_ptr(), got[1:].data_ptr(), got.nbytes) == -1, "past its end"
    assert there.unregister_memory(got.data_ptr()) == 0
    assert there.unregister_memory(got.data_ptr()) == -1
    assert sender.transfer_sync_write(address, here.data_ptr(), got.data_ptr(), got.nbytes) == -1
    assert got.tolist() == [0, 0, 0, 0]


def test_transfers_to_a_closed_peer_fail() -> None:
    there, address = engine()
    assert TransferEngine().send_probe(address) == 0
    there.server.shutdown()
    there.server.server_close()
    block = torch.ones(1)
    assert TransferEngine().send_probe(address) == -1
    assert TransferEngine().transfer_sync_write(address, block.data_ptr(), block.data_ptr(), 4) == -1


def test_memory_views_bytes_at_an_address() -> None:
    numbers = torch.tensor([1, 2], dtype=torch.uint8)
    memory(numbers.data_ptr(), 2)[1] = 7
    assert numbers.tolist() == [1, 7]


def test_pinned_tensors_are_made_and_passed_on() -> None:
    seen = list[torch.Tensor]()
    module = torch_with(lambda tensor: seen.append(tensor) or tensor)
    pinned = module.tensor([1, 2], dtype=torch.int32, pin_memory=True, device="cpu")
    assert pinned.tolist() == [1, 2]
    assert pinned.dtype is torch.int32
    plain = module.zeros(3)
    assert plain.tolist() == [0, 0, 0]
    assert [tensor is pinned for tensor in seen] == [True]


def test_other_attributes_are_torchs_own() -> None:
    module = torch_with(lambda tensor: tensor)
    names = {make.__name__ for make in MAKERS}
    assert all(value is vars(torch)[name] for name, value in vars(module).items() if name not in names)
