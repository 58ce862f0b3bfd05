"""Pinned memory where there is no device: tensors as asked for, handed to whoever marks them."""

import torch

from sglang_dflash.cpu.pinned import MAKERS, torch_with


def test_pinned_tensors_are_made_and_handed_on() -> None:
    seen = list[torch.Tensor]()
    module = torch_with(lambda tensor: seen.append(tensor) or tensor)
    pinned = module.tensor([1, 2], dtype=torch.int32, pin_memory=True, device="cpu")
    assert pinned.tolist() == [1, 2]
    assert pinned.dtype is torch.int32
    plain = module.zeros(3)
    assert plain.tolist() == [0, 0, 0]
    assert [tensor is pinned for tensor in seen] == [True]


def test_all_else_is_torch_itself() -> None:
    module = torch_with(lambda tensor: tensor)
    names = {make.__name__ for make in MAKERS}
    assert all(value is vars(torch)[name] for name, value in vars(module).items() if name not in names)
