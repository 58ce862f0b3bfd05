"""Terminal output of the demo: the tokens of each verify step in colours, and a table of speeds."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.tools.demo.ask import Answer, Step, ask
from sglang_dflash.tools.demo.pairs import Show
from sglang_dflash.tools.demo.verdict import difference

STEP_COLOURS = ("green", "cyan")  # alternating, to distinguish neighbouring steps


def has_colours(console: Console) -> bool:
    return console.is_terminal and not console.no_color


def legend(console: Console) -> str:
    if has_colours(console):
        return "are [green]coloured[/], [cyan]step by step[/]; the target's own tokens are [bold]bold[/]."
    return r"stand in \[brackets]; the rest are the target's own tokens."


class Painter:
    """Printer of steps: accepted drafts in the step's colour or in brackets, the target's own token in bold."""

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
        """Split a step's text into accepted drafts and the target's own token.

        The target's own token is the last token of a step, and the only token of the prefill. Its text is found by
        encoding the step's text again. If the encoding has another number of tokens than the step, no text is marked
        as the target's. This happens if the step contains an end token, which has no text, or only part of a character.
        """
        if self.n_shown == 0 or step.n_tokens == 1:
            return "", step.text
        encoding = self.tokenizer.encode(step.text, add_special_tokens=False)
        if len(encoding.ids) != step.n_tokens:
            return step.text, ""
        begin = encoding.offsets[-1][0]
        return step.text[:begin], step.text[begin:]


def compare(
    on: Server, off: Server, show: Show, console: Console, tokenizer: Tokenizer
) -> list[tuple[str, Answer, Answer]]:
    """Send every question of a pair to both servers, print the answers of `on`, and time both servers.

    Raises:
        ServerError: two answers differ.
    """
    with_speculation, without = on.openai(), off.openai()
    results = []
    for kind, question in show.questions:
        console.print(f"\n[bold]{question}[/]", highlight=False)
        answer = ask(with_speculation, question, Painter(console, tokenizer).show)
        plain = ask(without, question, lambda step: None)
        committed = (
            f"{answer.n_tokens} tokens in {answer.n_steps} steps, acceptance length {answer.committed_per_step:.1f}"
        )
        speeds = f"{answer.tokens_per_s:.0f} tokens/s, {plain.tokens_per_s:.0f} without"
        console.print(f"\n[dim]{committed}; {speeds}[/]", highlight=False)
        if sentence := difference((answer.text, plain.text), tokenizer):
            raise ServerError(f"{sentence} Without speculation:\n{plain.text}")
        results.append((kind, answer, plain))
    return results


def summary(results: Sequence[tuple[str, Answer, Answer]]) -> Table:
    table = Table(title="the same questions with and without speculation", title_justify="left", box=box.SIMPLE_HEAD)
    for name in (
        "question",
        "tokens",
        "steps",
        "acceptance\nlength",
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
    """Return one answer with the sums of all counts and times."""
    return Answer(
        text="".join(answer.text for answer in answers),
        n_tokens=sum(answer.n_tokens for answer in answers),
        seconds=sum(answer.seconds for answer in answers),
        n_steps=sum(answer.n_steps for answer in answers),
        n_accepted=sum(answer.n_accepted for answer in answers),
    )
