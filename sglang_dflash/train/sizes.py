"""Sizes of a DFlash 2 draft."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Second:
    """The sizes of a DFlash 2 draft, under their names in config.json; z-lab's published ones by default."""

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
