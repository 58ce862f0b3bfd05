"""Training text from the target: answers to prompts, one line of JSON per conversation.

Each line is written when its answer arrives, so an interrupted run resumes with the prompts that have no line yet.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

from sglang_dflash.cli import read_text
from sglang_dflash.train.chat import parsed, require_line

Messages = list[dict[str, Any]]
Line = dict[str, Any]  # messages, and perhaps tools and chat_template_kwargs
Write = Callable[[Line | None], None]  # called once per prompt, with the answered line; None: the answer is empty


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Every second prompt is answered at `temperature`, the others (0, 2, ...) greedily."""

    temperature: float = 0.7
    max_tokens: int = 256
    seed: int = 0

    def temperature_of(self, number: int) -> float:
        """Return the temperature of the prompt with this number."""
        return self.temperature if number % 2 else 0.0


class Source(Protocol):
    """The target as a writer of training text: a server, or a model in this process."""

    def answer(self, prompts: Sequence[tuple[int, Line]], sampling: Sampling, write: Write) -> None:
        """Answer numbered prompts in any order, and pass each answered line to `write`.

        Raises:
            ValueError: a prompt cannot be answered. Lines that are already written remain.
        """

    def user_turns(self, starts: Sequence[tuple[str, str]], stop: str, seed: int, write: Callable[[str], None]) -> None:
        """Continue user turns at temperature 0.9. Pass to `write`, in any order, those that reach `stop` in 120 tokens.

        Args:
            starts: pairs of a chat template's header and a turn's first words. `write` gets the turn without header.
        """


def name_of(line: Line) -> str:
    """Return a digest, 16 hex digits, of a line without its answer: messages, tools and template variables."""
    return sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:16]


def read_prompts(path: Path) -> list[Line]:
    """Return the conversations of a .jsonl file. Blank lines are skipped.

    Raises:
        ValueError: a line is no conversation, or its last turn is neither the user's nor a tool's.
    """
    found = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parsed(line)
            if not isinstance(row, dict) or not row.get("messages"):
                raise ValueError(f'found {line[:60]!r}; give {{"messages": [...]}} with at least one message')
            require_line(row)
            if (role := row["messages"][-1].get("role")) not in ("user", "tool"):
                raise ValueError(f"the last turn has the role {role!r}; end with a turn of the user or of a tool")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        found.append(row)
    return found


def whole_lines(out: Path) -> list[str]:
    """Complete or remove an incomplete last line of the file `out`, and return its lines; none if there is no file.

    Raises:
        ValueError: the first line is no JSON object. The beginning of an object is accepted if it is the only line and
            has no line end. On an error the file is unchanged.
    """
    text = read_text(out) if out.exists() else ""
    first, has_end, _ = text.partition("\n")
    if text and not is_object(first) and (has_end or not first.startswith('{"')):
        raise ValueError(f"--out {out}, line 1: found {first[:60]!r}, no JSON object; give another --out")
    *lines, last = text.split("\n")
    if is_object(last):
        lines.append(last)
    if last:
        out.write_text("".join(f"{line}\n" for line in lines))
    return lines


def is_object(line: str) -> bool:
    try:
        return isinstance(parsed(line), dict)
    except ValueError:
        return False


def answered(out: Path) -> Iterator[str]:
    """Yield the names of the conversations in the file `out`, after removing an incomplete last line.

    Raises:
        ValueError: a line is no conversation.
    """
    for number, line in enumerate(whole_lines(out), start=1):
        try:
            row = parsed(line)
            yield name_of(row | {"messages": row["messages"][:-1]})
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"--out {out}, line {number}: found {line[:60]!r}, not an answer; give another --out"
            ) from None


def write_answers(source: Source, prompts: Sequence[Line], out: Path, sampling: Sampling) -> int:
    """Append a line to `out` for each prompt that has no line yet, and return the number of lines written.

    Raises:
        ValueError: a prompt cannot be answered. Lines that are already written remain.
    """
    done = set(answered(out))
    missing = [(number, line) for number, line in enumerate(prompts) if name_of(line) not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    columns = (*Progress.get_default_columns()[:2], TimeElapsedColumn(), TimeRemainingColumn())
    with out.open("a") as file, Progress(*columns) as progress:
        bar = progress.add_task("answers", total=len(prompts), completed=len(prompts) - len(missing))

        def write(line: Line | None) -> None:
            nonlocal written
            progress.advance(bar)
            if line:
                file.write(json.dumps(line) + "\n")
                file.flush()
                written += 1

        if missing:
            source.answer(missing, sampling, write)
    return written
