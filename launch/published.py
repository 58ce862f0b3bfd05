"""What two model cards publish about width: throughput without speculation, at block 8 and at block 16; and its fits.

Both: one NVIDIA B200, SGLang, thinking on, at most 4096 new tokens, end-to-end throughput in tokens per second with the
prefill included. The acceptance length is what a step commits on average, accepted drafts + 1 bonus.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

CONCURRENCIES = (1, 8, 16, 32)
NARROW, BLOCK = 8, 16  # the two block sizes that were measured


class Task(NamedTuple):
    """Tokens per second by concurrency, acceptance length as the mean over concurrencies."""

    name: str
    off: tuple[int, ...]
    narrow: tuple[int, ...]
    block: tuple[int, ...]
    narrow_length: float
    block_length: float

    @property
    def better(self) -> tuple[int, ...]:
        """The better of the two columns with speculation."""
        return tuple(map(max, self.narrow, self.block))


class Card(NamedTuple):
    name: str
    tables: str
    tasks: tuple[Task, ...]


TABLES = (
    'model card of z-lab/{}: tables "Throughput and Speedup", columns AR and DFlash, '
    'block size 8 and block size 16; table "Acceptance Length"{}'
)
QWEN35_27B = Card(
    "Qwen3.5-27B-DFlash",
    TABLES.format("Qwen3.5-27B-DFlash", ", the second of each pair (MTP / DFlash)"),
    (
        Task("Math500", (84, 625, 1121, 1949), (335, 2020, 3646, 4288), (397, 2270, 3135, 3712), 5.90, 7.93),
        Task("GSM8K", (83, 625, 1109, 1914), (301, 1814, 2896, 3822), (330, 1868, 2589, 3152), 5.57, 7.22),
        Task("HumanEval", (83, 602, 1031, 1720), (350, 1856, 2749, 3412), (427, 2079, 2748, 3198), 6.34, 9.18),
        Task("MBPP", (84, 627, 1075, 1832), (311, 1757, 2661, 3309), (347, 1826, 2479, 2808), 5.60, 7.27),
        Task("MT-Bench", (84, 622, 1113, 1900), (250, 1495, 2403, 3256), (255, 1444, 1984, 2391), 4.54, 5.47),
    ),
)
QWEN36_35B_A3B = Card(
    "Qwen3.6-35B-A3B-DFlash",
    TABLES.format("Qwen3.6-35B-A3B-DFlash", ""),
    (
        Task("Math500", (234, 1266, 1954, 2755), (617, 2839, 4465, 6614), (682, 3138, 4813, 6520), 5.56, 7.35),
        Task("GSM8K", (235, 1236, 1886, 2699), (540, 2466, 3899, 5713), (556, 2564, 3821, 5239), 5.21, 6.73),
        Task("HumanEval", (238, 1255, 1944, 2767), (561, 2655, 4135, 6059), (603, 2800, 4208, 5782), 5.09, 6.44),
        Task("MBPP", (235, 1224, 1948, 2780), (497, 2324, 3636, 4884), (559, 2538, 3816, 5378), 4.78, 5.83),
        Task("MT-Bench", (233, 1238, 1885, 2633), (438, 2060, 3182, 4720), (442, 2028, 2997, 4034), 4.20, 5.14),
        Task("Alpaca", (235, 1221, 1844, 2579), (407, 1880, 2903, 4115), (393, 1782, 2567, 3689), 3.94, 4.62),
    ),
)
CARDS = (QWEN35_27B, QWEN36_35B_A3B)


def committed(conditional_D: np.ndarray) -> np.ndarray:
    """E(1) .. E(N): tokens a step commits on average, by width, from the conditional acceptance by position."""
    return np.concatenate(([1.0], 1.0 + conditional_D.cumprod().cumsum()))


def acceptance_curve(narrow_length: float, block_length: float) -> np.ndarray:
    """Conditional acceptance by position: the line in logits that commits these lengths at widths 8 and 16."""
    position_D = np.linspace(0.0, 1.0, BLOCK - 1)

    def curve(slope: float) -> np.ndarray:
        def with_level(level: float) -> np.ndarray:
            return 1 / (1 + np.exp(-(level + slope * position_D)))

        return with_level(_root(lambda level: committed(with_level(level))[NARROW - 1] - narrow_length))

    return curve(_root(lambda slope: committed(curve(slope))[-1] - block_length))


def _root(rising: Callable[[float], float], low: float = -15.0, high: float = 15.0) -> float:
    """Where a rising function is zero.

    Raises:
        ValueError: nowhere between `low` and `high`.
    """
    if not rising(low) < 0 < rising(high):
        raise ValueError("no curve of this kind commits these lengths")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def published_seconds(task: Task) -> np.ndarray:
    """Seconds per step at widths 1, 8, 16: [concurrencies, 3]."""
    speed_C3 = np.array((task.off, task.narrow, task.block)).T
    return np.array(CONCURRENCIES)[:, None] * (1.0, task.narrow_length, task.block_length) / speed_C3


def shared_seconds(card: Card) -> np.ndarray:
    """What a launch could measure, not knowing the task: medians over the tasks at widths 1, 8, 16."""
    return np.median([published_seconds(task) for task in card.tasks], axis=0)


def step_seconds(known_C3: np.ndarray, widths: Sequence[int], draft_share: float = 0.0) -> np.ndarray:
    """Seconds per step at `widths` from those at 1, 8, 16: [concurrencies, widths].

    Linear between 8 and 16. Between 1 and 8 the higher of two lines, the one from 1 to 8 and the one through 8 and 16:
    drafting costs the same from width 2 on. `draft_share` of what 16 costs more than a narrower width is for drafting
    16 and not fewer, and is not saved by verifying fewer.
    """
    width_W = np.array(widths)
    table = []
    for off, narrow, block in known_C3:
        straight_W = np.interp(width_W, (1, NARROW, BLOCK), (off, narrow, block))
        drafting_W = block - (block - narrow) * (BLOCK - width_W) / (BLOCK - NARROW)
        seconds_W = np.maximum(straight_W, drafting_W)
        seconds_W += draft_share * (block - seconds_W)
        table.append(np.where(width_W == 1, off, seconds_W))
    return np.array(table)
