"""Checks of tensors against the shapes that their names promise: `tokens_BN` has two dimensions, B and N.

One letter is one size within a call, so the suffixes are the contract. These checks run in decode steps, so they use
Python integers only and never wait for a device.
"""

import torch


class Shapes:
    """Sizes of named dimensions, each taken from the first tensor that has it.

    Every tensor must be contiguous and on the device of the first one, because the kernels index flat memory. Raises
    ValueError, naming the tensor, what was found and what was wanted.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.device: torch.device | None = None

    def check(self, *dtypes: torch.dtype, **tensors: torch.Tensor) -> None:
        """Check tensors whose names end in `_<dimensions>` and whose dtype is one of `dtypes`."""
        self.check_strided(*dtypes, **tensors)
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(f"{name} has strides {tensor.stride()}; pass {name}.contiguous()")

    def check_strided(self, *dtypes: torch.dtype, **tensors: torch.Tensor) -> None:
        """Check as `check` does, but leave strides to the caller."""
        for name, tensor in tensors.items():
            letters = name[name.rindex("_") + 1 :]
            wanted = [self.sizes.setdefault(*pair) for pair in zip(letters, tensor.shape, strict=False)]
            if len(letters) != tensor.dim() or list(tensor.shape) != wanted:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; its suffix and the other arguments require {self.sizes}"
                )
            if tensor.dtype not in dtypes:
                raise ValueError(f"{name} is {tensor.dtype}; pass {' or '.join(map(str, dtypes))}")
            if tensor.device != (self.device or tensor.device):
                raise ValueError(f"{name} is on {tensor.device}, the others on {self.device}; move it there")
            self.device = tensor.device

    def __getitem__(self, letter: str) -> int:
        return self.sizes[letter]
