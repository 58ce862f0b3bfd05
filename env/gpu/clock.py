"""Clock of a script's time limit, and its JSON document, rewritten after every result."""

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESERVE_S = 10.0  # seconds that stay free for the end of all servers


class Clock:
    """Time that is left of a limit."""

    def __init__(self, began: float, limit_s: float, now: Callable[[], float] = time.time) -> None:
        """Start a clock.

        Args:
            began: start of the script, in seconds since 1970.
            limit_s: time limit in seconds, `RESERVE_S` included.
            now: returns the current time in seconds since 1970.
        """
        self.began, self.limit_s, self.now = began, limit_s, now

    @classmethod
    def from_environment(cls) -> "Clock":
        """Return the clock that `common.sh` describes: GPU_BEGAN and MINUTES."""
        return cls(float(os.environ["GPU_BEGAN"]), 60 * float(os.environ["MINUTES"]))

    def passed_s(self) -> float:
        return self.now() - self.began

    def left_s(self) -> float:
        """Return the seconds left for work; negative if the time is up."""
        return self.limit_s - RESERVE_S - self.passed_s()

    def fits(self, seconds: float) -> bool:
        return seconds <= self.left_s()

    def within(self, seconds: float) -> float:
        """Return `seconds`, or fewer if fewer are left."""
        return max(0.0, min(seconds, self.left_s()))


class Document:
    """JSON document in a file that is replaced at once, so that a reader or a kill never finds half of it."""

    def __init__(self, path: Path, clock: Clock, **fields: Any) -> None:
        self.path, self.clock = path, clock
        self.fields: dict[str, Any] = {**fields, "left_out": [], "failed": {}, "parts_s": {}, "passed_s": 0.0}

    def save(self) -> None:
        self.fields["passed_s"] = round(self.clock.passed_s(), 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.fields, indent=1) + "\n")
        part.replace(self.path)

    def finish(self) -> None:
        """Mark the document as complete, and print its path."""
        self.fields["done"] = True
        self.save()
        print(self.path, flush=True)

    def leave_out(self, *names: str) -> None:
        """Record and print parts that are not run."""
        new = [name for name in names if name not in self.fields["left_out"]]
        self.fields["left_out"] += new
        for name in new:
            print(f"left out: {name} ({max(0, self.clock.left_s()):.0f} s left)", flush=True)
        self.save()

    def fail(self, name: str, why: str) -> None:
        """Record and print that a part failed."""
        self.fields["failed"][name] = why[-3000:]
        print(f"FAILED: {name}: {why[-1500:]}", flush=True)
        self.save()

    def part(self, name: str, estimate_s: float, run: Callable[[], None]) -> bool:
        """Run a part if its estimated time is left. Returns whether it ran. An error of the part is recorded."""
        if not self.clock.fits(estimate_s):
            self.leave_out(name)
            return False
        before = self.clock.passed_s()
        print(f"{before:5.0f} s: {name}", flush=True)
        try:
            run()
        except Exception as error:  # the next part may still succeed
            traceback.print_exc()
            self.fail(name, f"{type(error).__name__}: {error}")
        self.fields["parts_s"][name] = round(self.clock.passed_s() - before, 1)
        self.save()
        return True
