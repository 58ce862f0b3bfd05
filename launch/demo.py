"""The demo: the tiny pair served by stock SGLang with our worker, answering through the OpenAI API.

    make demo            # asks a few questions, then keeps serving on port 30000 until Ctrl-C
    make demo ONCE=1     # asks and leaves

Two servers start side by side, one with speculation and one without; every question goes to both. SGLang streams one
chunk per step, with the number of tokens so far, so what is coloured below is what each verify step really committed.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import openai
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from launch import tiny
from launch.tiny import Arm, Pair, require_worker
from sglang_dflash.bench.errors import ServerError
from sglang_dflash.bench.ports import free_port
from sglang_dflash.bench.progress import wait_ready
from sglang_dflash.bench.server import Server, end_on_sigterm

TASKS = ("times_table", "json_record", "python_function", "story")
MAX_TOKENS = 160
STEP_COLOURS = ("green", "cyan")  # alternating, so that neighbouring steps can be told apart


class Step(NamedTuple):
    """What one chunk brought: one verify step, or the prefill's token."""

    text: str
    n_tokens: int


class Answer(NamedTuple):
    text: str
    n_tokens: int
    seconds: float
    n_steps: int
    n_accepted: int

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds

    @property
    def committed_per_step(self) -> float:
        return 1 + self.n_accepted / self.n_steps if self.n_steps else 1.0


def ask(client: openai.OpenAI, question: str, show: Callable[[Step], None]) -> Answer:
    """One streamed chat completion, greedy; `show` sees every step as it arrives."""
    text, n_tokens, sent = "", 0, time.perf_counter()
    details: dict[str, Any] = {}
    arrived = sent
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"return_spec_tokens_details": True},
    )
    for chunk in stream:
        details |= (chunk.model_extra or {}).get("sglext") or {}
        if not chunk.choices or chunk.usage is None:
            continue
        step = Step(chunk.choices[0].delta.content or "", chunk.usage.completion_tokens - n_tokens)
        text, n_tokens, arrived = text + step.text, n_tokens + step.n_tokens, time.perf_counter()
        show(step)
    counters = details.get("spec_tokens_details") or {"spec_verify_ct": 0, "spec_num_correct_drafts": 0}
    return Answer(text, n_tokens, arrived - sent, counters["spec_verify_ct"], counters["spec_num_correct_drafts"])


def has_colours(console: Console) -> bool:
    return console.is_terminal and not console.no_color


def legend(console: Console) -> str:
    if has_colours(console):
        return "are [green]coloured[/], [cyan]step by step[/]; the target's own tokens are [bold]bold[/]."
    return r"stand in \[brackets]; the rest are the target's own tokens."


class Painter:
    """Prints steps: accepted drafts in the step's colour (or in brackets), the target's own token in bold."""

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self.console, self.tokenizer = console, tokenizer
        self.n_shown = 0

    def show(self, step: Step) -> None:
        drafts, own = self._split(step)
        colour = STEP_COLOURS[self.n_shown % len(STEP_COLOURS)]
        if drafts and not has_colours(self.console):
            drafts = f"[{drafts}]"
        painted = Text.assemble((drafts, colour), (own, "bold"))
        self.console.print(painted, end="", soft_wrap=True)
        self.n_shown += bool(step.n_tokens)

    def _split(self, step: Step) -> tuple[str, str]:
        """(accepted drafts, the target's own token): a step's last token is the target's, and so is the prefill's.

        A step's text is encoded again to find where its last token begins. Where that gives another number of tokens
        (an end token has no text; a character can be split between steps) nothing is marked as the target's.
        """
        if self.n_shown == 0 or step.n_tokens == 1:
            return "", step.text
        encoding = self.tokenizer.encode(step.text, add_special_tokens=False)
        if len(encoding.ids) != step.n_tokens:
            return step.text, ""
        begin = encoding.offsets[-1][0]
        return step.text[:begin], step.text[begin:]


def questions() -> list[tuple[str, str]]:
    """(kind, question), none of which the pair was trained on."""
    from sglang_dflash.train.corpus import draw

    random = Random(1)
    return [(task.replace("_", " "), draw(random, held_out=True, task=task).prompt) for task in TASKS]


def compare(on: Server, off: Server, console: Console, tokenizer: Tokenizer) -> list[tuple[str, Answer, Answer]]:
    """Every question to both servers: shown from the first, timed on both.

    Raises:
        ServerError: the two answers to a question differ.
    """
    with_speculation, without = on.openai(), off.openai()
    for client in (with_speculation, without):  # the first request of a server pays for lazy set-up
        ask(client, "Hello.", lambda step: None)
    results = []
    for kind, question in questions():
        console.print(f"\n[bold]{question}[/]", highlight=False)
        answer = ask(with_speculation, question, Painter(console, tokenizer).show)
        plain = ask(without, question, lambda step: None)
        committed = (
            f"{answer.n_tokens} tokens in {answer.n_steps} steps, {answer.committed_per_step:.1f} committed per step"
        )
        speeds = f"{answer.tokens_per_s:.0f} tokens/s, {plain.tokens_per_s:.0f} without"
        console.print(f"\n[dim]{committed}; {speeds}[/]", highlight=False)
        if answer.text != plain.text:
            raise ServerError(f"the answer differs without speculation, which must never happen:\n{plain.text}")
        results.append((kind, answer, plain))
    return results


def summary(results: Sequence[tuple[str, Answer, Answer]]) -> Table:
    table = Table(title="the same text with and without speculation", title_justify="left", box=box.SIMPLE_HEAD)
    for name in (
        "question",
        "tokens",
        "steps",
        "committed\nper step",
        "tokens/s\nwith",
        "tokens/s\nwithout",
        "speedup",
    ):
        table.add_column(name, justify="left" if name == "question" else "right", no_wrap=True)
    total_on, total_off = total([on for _, on, _ in results]), total([off for _, _, off in results])
    for kind, on, off in [*results, ("all", total_on, total_off)]:
        speeds = f"{on.tokens_per_s:.0f}", f"{off.tokens_per_s:.0f}", f"{on.tokens_per_s / off.tokens_per_s:.1f}x"
        table.add_row(kind, str(on.n_tokens), str(on.n_steps), f"{on.committed_per_step:.1f}", *speeds)
    return table


def total(answers: Sequence[Answer]) -> Answer:
    """All of them as if they were one."""
    return Answer(
        text="".join(answer.text for answer in answers),
        n_tokens=sum(answer.n_tokens for answer in answers),
        seconds=sum(answer.seconds for answer in answers),
        n_steps=sum(answer.n_steps for answer in answers),
        n_accepted=sum(answer.n_accepted for answer in answers),
    )


def make_server(arm: Arm, pair: Pair, port: int) -> Server:
    return Server(
        tiny.command(arm, pair, *tiny.FLAGS, *tiny.HYBRID_FLAGS),
        port=port,
        log=tiny.RUN_DIR / f"demo-{port}-{arm}.log",
        env=tiny.ENV | tiny.environment(arm),
        name="without speculation" if arm is Arm.OFF else "with DFlash",
    )


def keep_serving(server: Server, console: Console) -> None:
    """Until Ctrl-C, or until the server ends by itself.

    Raises:
        ServerError: it did.
    """
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": questions()[0][1]}]})
    console.print(f"\nServing [bold]{server.url}/v1[/] until Ctrl-C; the log is {server.log}. Try:", highlight=False)
    print(f"  curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'")
    while server.running:
        time.sleep(0.5)
    raise ServerError(f"the server ended by itself; the end of {server.log}:\n{server.log_tail()}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launch.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--once", action="store_true", help="leave when the questions are answered")
    parser.add_argument("--arm", type=Arm, default=Arm.PLUGIN, choices=[Arm.PLUGIN, Arm.STOCK], help="whose worker")
    parser.add_argument("--target", type=Path, default=tiny.HYBRID.target)
    parser.add_argument("--draft", type=Path, default=tiny.HYBRID.draft)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options, console = parse(arguments), Console()
    end_on_sigterm()
    pair = Pair(options.target, options.draft)
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    on = make_server(options.arm, pair, options.port)
    off = make_server(Arm.OFF, pair, free_port(options.port + 1))
    try:
        on.start()
        off.start()
        console.print(f"[bold]sglang-dflash {version('sglang-dflash')}[/] on SGLang {version('sglang')}, CPU only")
        console.print("[dim]Two servers start; most of that time is SGLang importing its packages.[/]")
        wait_ready([on, off], console)
        require_worker(options.arm, on)
        console.print(f"\nAccepted drafts {legend(console)}")
        console.print(summary(compare(on, off, console, tokenizer)))
        off.stop()
        if not options.once:
            keep_serving(on, console)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave a server behind
        console.print("\n[dim]stopping[/]")
        on.stop()
        off.stop()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("stopped")
    except ServerError as error:
        sys.exit(f"make demo: {error}")
