"""How much of a prompt is read although it is in the prefix cache, when the draft keeps a window.

A hit fills nothing of the draft's ring: its window begins with the tokens that are read. After another question that is
context enough. Where next to nothing is new (the same prompt again, n > 1, a request that was retracted), drafts fail
for some thirty tokens; launch/measure_hits.py has the curves. So the end of a prompt is always read: an attention-only
target takes hardly longer for 64 tokens than for one. A recurrent target resumes from checkpoints, which may be far
between or missing, and what lies behind the last one is read anyway: there a hit is left as it is.
"""

from __future__ import annotations

from typing import Any

READ_AGAIN = 64  # tokens


def leave_the_end(longest: int, request: Any, input_len: int) -> int:
    """AFTER `Req._compute_max_prefix_len`: how long a hit may be."""
    return max(min(longest, input_len - READ_AGAIN), 0)
