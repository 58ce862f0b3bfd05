"""Checks of tensors against the shapes in their names: `tokens_BN` has two dimensions, B and N.

Within one `Shapes` a letter stands for one size. The checks run in decode steps, so they use only shapes, strides and
dtypes, which the host has, and never wait for a device.
"""

import torch


class Shapes:
    """Sizes of dimensions, by letter, and the device. The first checked tensor with a letter sets the letter's size."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.device: torch.device | None = None

    def check(self, *dtypes: torch.dtype, **tensors: torch.Tensor) -> None:
        """Check tensors whose names end in `_<letters>`. They must be contiguous, because kernels index flat memory.

        Raises:
            ValueError: a tensor has another shape or device, a dtype not in `dtypes`, or is not contiguous.
        """
        self.check_strided(*dtypes, **tensors)
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(f"{name} has strides {tensor.stride()}; pass {name}.contiguous()")

    def check_strided(self, *dtypes: torch.dtype, **tensors: torch.Tensor) -> None:
        """Check tensors as `check` does, but accept any strides.

        Raises:
            ValueError: a tensor has another shape or device, or a dtype not in `dtypes`.
        """
        for name, tensor in tensors.items():
            letters = name[name.rindex("_") + 1 :]
            wanted = [self.sizes.setdefault(*pair) for pair in zip(letters, tensor.shape, strict=False)]
            if len(letters) != tensor.dim():
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; its suffix {letters} requires {len(letters)} dimensions"
                )
            if list(tensor.shape) != wanted:
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
