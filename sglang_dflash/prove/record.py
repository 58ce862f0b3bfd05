"""What a check is, and what came of it. Knows neither servers nor GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sglang_dflash.servers.errors import ServerError

if TYPE_CHECKING:
    from sglang_dflash.prove.machine import Place

Made = TypeVar("Made")

# What a check may raise to say that it failed: its own assertion, or whatever broke under it. CUDA's errors are
# RuntimeErrors. Anything else ends the check's process, which counts as a failure too.
FAILURES = (
    AssertionError,
    ServerError,
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SystemExit,
    TypeError,
    ValueError,
)


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    TIMED_OUT = "timed out"


class Needs(StrEnum):
    ANY = "any"  # a GPU, or the rehearsal of one
    GPU = "gpu"
    REHEARSAL = "rehearsal"


class Skipped(Exception):
    """A check says that it does not apply here; the message is why."""


@dataclass(frozen=True)
class Finding:
    """What a check that passed found: a sentence, and the numbers behind it."""

    text: str
    numbers: dict[str, Any] = field(default_factory=dict)


class Failed(AssertionError):
    """A check that failed and has numbers to show."""

    def __init__(self, text: str, numbers: dict[str, Any]) -> None:
        super().__init__(text)
        self.numbers = numbers


@dataclass(frozen=True)
class Result:
    name: str
    status: Status
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        return self.status in (Status.FAILED, Status.TIMED_OUT)


@dataclass(frozen=True)
class Check:
    """
    Attributes:
        proves: a sentence without its full stop.
        minutes: it may take at most this long; those of one process share the sum.
        run: returns what it found, or raises `Skipped` or one of `FAILURES`.
        needs: where it can run.
        short: part of the short form.
        expected: the computed values that stand beside the measured ones in the table, if any.
        process: checks of the same word run in one process, one after the other, over the same server.
    """

    name: str
    proves: str
    minutes: float
    run: Callable[[Place], Finding]
    needs: Needs = Needs.ANY
    short: bool = False
    process: str = ""
    expected: str = ""


def require(holds: bool, text: str, numbers: dict[str, Any]) -> Finding:
    """
    Raises:
        Failed: it does not hold.
    """
    if not holds:
        raise Failed(text, numbers)
    return Finding(text, numbers)


class Once(Generic[Made]):
    """Made when it is first asked for; a failure is the answer for everybody who asks."""

    def __init__(self, make: Callable[[Place], Made]) -> None:
        self.make = make
        self.made: Made | None = None
        self.failure: BaseException | None = None

    def __call__(self, place: Place) -> Made:
        if self.failure is not None:
            raise self.failure
        if self.made is None:
            try:
                self.made = self.make(place)
            except (*FAILURES, Skipped) as failure:
                self.failure = failure
                raise
        return self.made
