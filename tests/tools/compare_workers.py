"""What a request may ask for, and who keeps it: SGLang's built-in DFLASH worker and ours, each against no speculation.

    python -m tests.tools.compare_workers            # the tiny pair on this CPU, in fp32, where exact can be decided

Three servers run side by side and are asked the same things, case by case: every case of `parameters.py` with every
question. What must be the same is compared token for token, with text, finish reason, counts, logprobs and
hidden states; what is drawn is compared as a distribution (`prove/law.py`). Three more servers, in SGLang's
deterministic mode, are asked with seeds. Prints a Markdown table; the JSON document with every case goes to
`launch/results/`, its path is the last line of stdout.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from sglang_dflash.prove import law
from sglang_dflash.servers.document import file_name, head, write
from sglang_dflash.servers.errors import ServerError
from sglang_dflash.servers.ports import free_port
from sglang_dflash.servers.progress import wait_ready
from sglang_dflash.servers.server import Server, end_on_sigterm
from sglang_dflash.tiny import pairs as tiny
from sglang_dflash.tiny.pairs import Arm, require_worker
from tests.tools import parameters
from tests.tools.parameters import EXACT, PLAIN, QUESTIONS, SAMPLED, Case, Refusal, Reply

ROOT = Path(__file__).parents[2]
WORKERS = (Arm.STOCK, Arm.PLUGIN)
PARTS = ("exact", "drawn", "seeded")
GAP = 1e-4  # of fp32 sums in another order
# Draws are many and short: larger batches than the tiny pair's flags allow.
DRAWING_FLAGS = ("--max-running-requests", "32", "--max-mamba-cache-size", "256", "--max-total-tokens", "16384")
SEEDED_FLAGS = ("--enable-deterministic-inference",)
SEEDED_ENV = parameters.REFERENCE_ENV | {"TORCHDYNAMO_DISABLE": "1"}
SEEDED = tuple(
    Case("sampling_seed", f"seed {seed}", {"temperature": 1.0, "sampling_seed": seed, **more})
    for seed, more in ((1, {}), (2, {"top_k": 20}), (3, {"top_p": 0.9}))
)
UNSEEDED = Case("", "another seed", {"temperature": 1.0, "sampling_seed": 0})
ORDER = list(dict.fromkeys(case.row for case in (*EXACT, *SAMPLED, *SEEDED)))  # of the table's lines
METHOD = (
    "exact: same token ids, text, finish reason and token counts as without speculation, logprobs and hidden states "
    "within 1e-4. "
    f"same law: the first {law.N_POSITIONS} tokens' shares within {law.BOUND:.0f} standard errors. ignored: every "
    "wrong answer is the one given without the parameter, or every draw follows the law without it. All in fp32, at "
    "concurrency 8, draws 32 at a time. Without speculation the overlap schedule is off: under it SGLang counts "
    "output for penalties one token late, and its penalties are applied in the order they have under it."
)


class Verdict(NamedTuple):
    """What one worker made of one case."""

    kind: str  # exact, wrong, refused, ignored, same law, another law
    n: int  # answers that were right, or draws
    of: int
    example: str = ""

    def __str__(self) -> str:
        return self.kind if self.kind == "refused" else f"{self.kind} ({self.n} of {self.of})"


# ------------------------------------------------------------------------------------------------------- the servers


@contextmanager
def serving(
    options: argparse.Namespace, flags: Sequence[str], env: dict[str, str], console: Console
) -> Iterator[dict[Arm, Server]]:
    """One server per arm, side by side."""
    servers, port = {}, options.port
    with ExitStack() as stack:
        for arm in tiny.ARMS:
            port = free_port(port)
            is_reference = arm is Arm.OFF
            own = parameters.REFERENCE_FLAGS if is_reference else parameters.REQUEST_FLAGS
            servers[arm] = Server(
                tiny.command(arm, tiny.HYBRID, *tiny.FLAGS, *tiny.HYBRID_FLAGS, *own, *flags),
                port=port,
                log=ROOT / ".run" / f"compare-{port}-{arm}.log",
                env=tiny.ENV | tiny.environment(arm) | (parameters.REFERENCE_ENV if is_reference else {}) | env,
                name=str(arm),
            )
            stack.callback(servers[arm].stop)
            servers[arm].start()
            port += 1
        wait_ready(list(servers.values()), console)
        for arm, server in servers.items():
            require_worker(arm, server)
        yield servers


# ------------------------------------------------------------------------------------------------------ the verdicts


def judge(off: Sequence[Reply], plain: Sequence[Reply], replies: Sequence[Reply]) -> Verdict:
    """One worker's replies to a case, beside those without speculation and its own without the parameter."""
    refused = [reply for reply in replies if isinstance(reply, Refusal)]
    if refused:
        return Verdict(
            "refused", len(replies) - len(refused), len(replies), f"{refused[0].status} {refused[0].message}"
        )
    wrong = [i for i in range(len(off)) if differs(off[i], replies[i])]
    if not wrong:
        return Verdict("exact", len(off), len(off))
    first = wrong[0]
    example = f"{QUESTIONS[first]!r}: {shown(off[first])}, but {shown(replies[first])}"
    ignored = all(outcomes(replies[i])[0] == outcomes(plain[i])[0] for i in wrong)
    return Verdict("ignored" if ignored else "wrong", len(off) - len(wrong), len(off), example)


def differs(off: Reply, reply: Reply) -> bool:
    if isinstance(off, Refusal) or isinstance(reply, Refusal) or outcomes(off) != outcomes(reply):
        return off != reply
    gaps = [
        parameters.furthest(parameters.numbers_of(a), parameters.numbers_of(b)) for a, b in zip(off, reply, strict=True)
    ]
    return max(gaps) > GAP


def outcomes(reply: Reply) -> list[Any]:
    return [reply] if isinstance(reply, Refusal) else [sample.outcome for sample in reply]


def shown(reply: Reply) -> str:
    if isinstance(reply, Refusal):
        return f"{reply.status} {reply.message}"
    reason = reply[0].meta["finish_reason"]
    return f"{reply[0].text!r} ({reason['type']} {reason.get('matched', reason.get('length', ''))})"


def judge_draws(off: Sequence[law.Draw], plain: Sequence[law.Draw], drawn: Sequence[law.Draw]) -> Verdict:
    """One worker's draws, beside those without speculation, with the parameter and without."""
    apart = law.violations(off, drawn)
    if not apart:
        return Verdict("same law", len(drawn), len(drawn))
    kind = "another law" if law.violations(plain, drawn) else "ignored"
    return Verdict(kind, len(drawn), len(drawn), f"{len(apart)} cells of {len(law.cells(off, drawn))}; {apart[0]}")


# ------------------------------------------------------------------------------------------------------ the comparison


class Comparison:
    """Rows of verdicts, filled case by case."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.rows: list[dict[str, Any]] = json.loads(options.add_to.read_text())["rows"] if options.add_to else []
        self.prompts = [parameters.chat(question) for question in QUESTIONS]

    def exact(self, servers: dict[Arm, Server], cases: Sequence[Case], plain: Case) -> None:
        """Cases whose answers must be the same; `plain` is what they ask for, without the parameter."""
        without = {arm: self._ask(server, plain) for arm, server in servers.items()}
        for case in cases:
            replies = {arm: self._ask(server, case) for arm, server in servers.items()}
            verdicts = {arm: judge(replies[Arm.OFF], without[arm], replies[arm]) for arm in WORKERS}
            changed = sum(outcomes(a) != outcomes(b) for a, b in zip(replies[Arm.OFF], without[Arm.OFF], strict=True))
            self._add(case, verdicts, changed=changed)

    def drawn(self, servers: dict[Arm, Server], cases: Sequence[Case]) -> None:
        """Cases above temperature 0."""
        n = self.options.draws
        for case in cases:
            off = parameters.draws(servers[Arm.OFF], case, n)
            bare = parameters.bare(case)
            without = off if bare.sampling == case.sampling else parameters.draws(servers[Arm.OFF], bare, n)
            verdicts = {arm: self._judge_draws(servers[arm], case, off, without) for arm in WORKERS}
            self._add(case, verdicts, changed=len(law.violations(off, without)))

    def _judge_draws(self, server: Server, case: Case, off: list[law.Draw], plain: list[law.Draw]) -> Verdict:
        try:
            drawn = parameters.draws(server, case, len(off))
        except ServerError as error:
            return Verdict("refused", 0, len(off), str(error))
        return judge_draws(off, plain, drawn)

    def _ask(self, server: Server, case: Case) -> list[Reply]:
        return parameters.ask_all(server, [(prompt, case) for prompt in self.prompts])

    def _add(self, case: Case, verdicts: dict[Arm, Verdict], *, changed: int) -> None:
        row = {"row": case.row, "case": case.name, "sampling": dict(case.sampling), "fields": dict(case.fields)}
        self.rows.append(
            row | {"changed": changed} | {str(arm): verdict._asdict() for arm, verdict in verdicts.items()}
        )
        stock, ours = (verdicts[arm] for arm in WORKERS)
        self.console.print(f"  {case.row}: {case.name}: built-in {stock}, ours {ours}", highlight=False, soft_wrap=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of `docs/exactness.md`: one line per parameter, all its cases together."""
    lines = ["| parameter | SGLang's built-in DFLASH | sglang-dflash |", "|---|---|---|"]
    for name in sorted({row["row"] for row in rows}, key=ORDER.index):
        mine = [row for row in rows if row["row"] == name]
        cells = [cell([Verdict(**row[arm]) for row in mine]) for arm in map(str, WORKERS)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(verdicts: Sequence[Verdict]) -> str:
    """Answers and draws apart; the worst is named."""
    answers = [verdict for verdict in verdicts if verdict.kind in ("exact", "wrong") or verdict.of <= len(QUESTIONS)]
    draws = [verdict for verdict in verdicts if verdict not in answers]
    return "; ".join(summary for summary in (answers_cell(answers), draws_cell(draws)) if summary)


def answers_cell(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    n_wrong, of = sum(verdict.of - verdict.n for verdict in verdicts), sum(verdict.of for verdict in verdicts)
    kinds = {verdict.kind for verdict in verdicts}
    if kinds == {"exact"}:
        return f"exact ({of} answers)"
    if kinds == {"refused"}:
        return f"refused: {verdicts[0].example}"
    label = (
        "**ignored**" if kinds <= {"ignored", "exact"} else "refused" if kinds <= {"refused", "exact"} else "**wrong**"
    )
    return f"{label}: {n_wrong} of {of} answers differ"


def draws_cell(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    of = sum(verdict.of for verdict in verdicts)
    bad = [verdict for verdict in verdicts if verdict.kind != "same law"]
    if not bad:
        return f"same law ({of} draws)"
    kinds = " and ".join(sorted({verdict.kind for verdict in bad}))
    return f"**{kinds}** in {len(bad)} of {len(verdicts)} settings"


def document(rows: list[dict[str, Any]], options: argparse.Namespace, command: str) -> dict[str, Any]:
    return {
        **head("compare_workers", command),
        "method": METHOD,
        "questions": list(QUESTIONS),
        "draws": options.draws,
        "table": table(rows).splitlines(),
        "rows": rows,
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.compare_workers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--draws", type=int, default=600, help="per setting and server (600)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to compare (everything)")
    parser.add_argument("--add-to", type=Path, help="an earlier JSON file of other parts; its rows come first")
    parser.add_argument("--port", type=int, default=31000, help="look for free ports from here on (31000)")
    parser.add_argument(
        "--output", type=Path, help="the JSON file (launch/results/<date>-<machine>-<commit>-workers.json)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    options = parse(arguments)
    end_on_sigterm()
    console = Console()
    comparison = Comparison(options, console)
    if "exact" in options.parts:
        with serving(options, (), {}, console) as servers:
            comparison.exact(servers, EXACT, PLAIN)
    if "drawn" in options.parts:
        with serving(options, DRAWING_FLAGS, {}, console) as servers:
            comparison.drawn(servers, SAMPLED)
    if "seeded" in options.parts:
        with serving(options, SEEDED_FLAGS, SEEDED_ENV, console) as servers:
            comparison.exact(servers, SEEDED, UNSEEDED)
    command = shlex.join(["python", "-m", "tests.tools.compare_workers", *arguments])
    print(table(comparison.rows))
    print(
        write(
            document(comparison.rows, options, command),
            options.output or ROOT / "launch" / "results" / file_name("workers"),
        )
    )


if __name__ == "__main__":
    try:
        main()
    except ServerError as error:
        sys.exit(f"compare_workers: {error}")
