"""Sizes of a DFlash 2 draft."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Second:
    """Sizes of a DFlash 2 draft, named as in config.json. The defaults are those of z-lab's published drafts."""

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
