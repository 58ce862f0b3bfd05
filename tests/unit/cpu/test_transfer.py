"""Writes into another engine's memory, over loopback, in one process."""

import torch

from sglang_dflash.cpu.transfer import TransferEngine, memory


def engine() -> tuple[TransferEngine, str]:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made, f"127.0.0.1:{made.get_rpc_port()}"


def test_parts_land_where_they_were_sent() -> None:
    here, (there, address) = torch.arange(6, dtype=torch.int32), engine()
    got = torch.full((9,), -1, dtype=torch.int32)
    assert there.register_memory(got.data_ptr(), got.nbytes) == 0
    first, second = here.data_ptr(), here[4:].data_ptr()
    at = got[6:].data_ptr(), got[1:].data_ptr()
    assert TransferEngine().batch_transfer_sync_write(address, [first, second], list(at), [12, 8]) == 0
    assert got.tolist() == [-1, 4, 5, -1, -1, -1, 0, 1, 2]


def test_what_is_not_registered_is_not_written() -> None:
    here, got, (there, address) = torch.ones(4), torch.zeros(4), engine()
    there.register_memory(got.data_ptr(), got.nbytes)
    sender = TransferEngine()
    assert sender.transfer_sync_write(address, here.data_ptr(), got[1:].data_ptr(), got.nbytes) == -1, "past its end"
    assert there.unregister_memory(got.data_ptr()) == 0
    assert there.unregister_memory(got.data_ptr()) == -1
    assert sender.transfer_sync_write(address, here.data_ptr(), got.data_ptr(), got.nbytes) == -1
    assert got.tolist() == [0, 0, 0, 0]


def test_a_peer_that_is_gone_is_a_failed_transfer() -> None:
    there, address = engine()
    assert TransferEngine().send_probe(address) == 0
    there.server.shutdown()
    there.server.server_close()
    block = torch.ones(1)
    assert TransferEngine().send_probe(address) == -1
    assert TransferEngine().transfer_sync_write(address, block.data_ptr(), block.data_ptr(), 4) == -1


def test_memory_is_the_bytes_at_an_address() -> None:
    numbers = torch.tensor([1, 2], dtype=torch.uint8)
    memory(numbers.data_ptr(), 2)[1] = 7
    assert numbers.tolist() == [1, 7]
