"""Would drafts that are drawn, and kept by rejection sampling, commit more per step than the likeliest ones?

    python -m launch.measure_rejection [--texts 36]      # the tiny pairs, in plain torch on a CPU

The worker drafts what is likeliest and keeps it while the target draws the same: a draft x is kept with probability
p(x), the target's. A draft drawn from q is kept with min(1, p(x) / q(x)) (Leviathan et al. 2023, arXiv:2211.17192).
Both rules are asked at the same places of the same texts, which the target drew, and each place says what it expects:
no coin is tossed for keeping, so what differs is the rule. Text by text the two commit so unlike numbers of tokens that
a comparison of whole answers would say little.

A table for people; a JSON document, whose path is the last line of stdout.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_dflash.bench.prompts import held_out, tokenize
from sglang_dflash.model import DraftModel
from sglang_dflash.model.generate import Options, draft_logits, hidden_of_blocks, spec_steps
from sglang_dflash.model.target import stop_token_ids
from sglang_dflash.servers.document import file_name, head, write
from sglang_dflash.tiny import pairs as tiny

ANSWER, SHORTEST = 72, 4  # tokens of an answer
EVERY = 4  # of an answer's tokens begins a block
N_DRAWN = 4  # blocks at a place, for rules that draw
TEMPERATURES = (0.7, 1.0, 1.3, 1.6)
LIKELIEST = "likeliest"
RULES = {LIKELIEST: None, "drawn, T": 1.0, "0.7 T": 0.7, "0.5 T": 0.5, "0.3 T": 0.3}
PAIRS = {"hybrid": tiny.HYBRID, "dense": tiny.DENSE, "hybrid, DFlash 2": tiny.HYBRID_2, "dense, DFlash 2": tiny.DENSE_2}


class Places:
    """A text, the places where blocks begin in it, and what the draft makes of them: A places, D drafts at each."""

    def __init__(self, draft: DraftModel, target: PreTrainedModel, text: Sequence[int], first: int) -> None:
        self.draft, self.target, self.text = draft, target, torch.tensor(text)
        self.at_A = torch.arange(first, len(text) - 1, EVERY)
        self.hidden_ADH = hidden_of_blocks(draft, target, self.text, self.at_A, (draft.config.block_size, None))
        self.logits_ADV = draft_logits(self.hidden_ADH, target)

    def drafted(self, temperature: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts, int64 [A, D], and how likely each was to be drawn, [A, D]: 1 at temperature None, the likeliest."""
        selector = self.draft.candidate_selector
        if selector is not None:
            tokens_ADK, unary_ADK = selector.candidates(self.logits_ADV)
        path, likely = [self.text[self.at_A]], list[torch.Tensor]()
        for d in range(self.logits_ADV.shape[1]):
            score = self.logits_ADV[:, d]
            if selector is not None:
                score = unary_ADK[:, d] + selector.edges(path[-1], self.hidden_ADH[:, d], tokens_ADK[:, d])
            if temperature is None:
                choice_A1 = score.argmax(1, keepdim=True)
                likely.append(torch.ones(len(score)))
            else:
                q = (score / temperature).softmax(1)
                choice_A1 = q.multinomial(1)
                likely.append(q.gather(1, choice_A1)[:, 0])
            path.append((choice_A1 if selector is None else tokens_ADK[:, d].gather(1, choice_A1))[:, 0])
        return torch.stack(path[1:], 1), torch.stack(likely, 1)

    def agreed(self, drafts_AD: torch.Tensor, temperature: float) -> torch.Tensor:
        """How likely the target is to draw each draft behind those before it, [A, D]."""
        A, D = drafts_AD.shape
        slots_AD = self.at_A[:, None] + 1 + torch.arange(D)
        rows_AS = torch.zeros(A, int(slots_AD.max()) + 1, dtype=torch.int64)  # what is behind a block is not seen
        rows_AS[:, : len(self.text)] = self.text[: rows_AS.shape[1]]
        rows_AS.scatter_(1, slots_AD, drafts_AD)
        logits_ASV = self.target(input_ids=rows_AS, use_cache=False).logits
        p_ADV = (logits_ASV[torch.arange(A)[:, None], slots_AD - 1] / temperature).softmax(-1)
        return p_ADV.gather(2, drafts_AD[..., None])[..., 0]

    def expected(self, temperature: float, cooler: float | None) -> float:
        """Tokens that a step commits, its own token among them: the mean over places."""
        kept_RA = []
        for _ in range(1 if cooler is None else N_DRAWN):
            drafts_AD, likely_AD = self.drafted(None if cooler is None else cooler * temperature)
            kept_AD = (self.agreed(drafts_AD, temperature) / likely_AD).clamp(max=1)
            kept_RA.append(1 + kept_AD.cumprod(1).sum(1))
        return float(torch.stack(kept_RA).mean())


@torch.inference_mode()
def measure(name: str, temperature: float, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    pair = PAIRS[name]
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    draft = DraftModel.from_pretrained(pair.draft, dtype=torch.float32)
    prompts = tokenize(held_out(options.texts, seed=11), pair.target, thinking=False)
    by_rule: dict[str, list[float]] = {rule: [] for rule in RULES}
    torch.manual_seed(0)
    for prompt in track(prompts, f"{name} at {temperature}", console=console):
        drawing = Options(max_new_tokens=ANSWER, temperature=temperature, stop_token_ids=stop_token_ids(target))
        steps = spec_steps(draft, target, torch.tensor([prompt]), drawing)
        answer = [token for step in steps for token in step.committed]
        if len(answer) < SHORTEST:
            continue
        places = Places(draft, target, [*prompt, *answer], len(prompt))
        for rule, cooler in RULES.items():
            by_rule[rule].append(places.expected(temperature, cooler))
    return [
        {
            "pair": name, "temperature": temperature, "rule": rule, "n_texts": len(expected),
            "committed_per_step": fmean(expected), **over_likeliest(expected, by_rule[LIKELIEST]),
        }
        for rule, expected in by_rule.items()
    ]  # fmt: skip


def over_likeliest(expected: Sequence[float], likeliest: Sequence[float]) -> dict[str, float]:
    """How many tokens more, text by text: places of one text are not independent."""
    more = [a - b for a, b in zip(expected, likeliest, strict=True)]
    return {"more_than_likeliest": fmean(more), "standard_error": stdev(more) / len(more) ** 0.5}


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="tokens committed per step, and more than the likeliest drafts, in standard errors")
    for name in ("pair", "temperature", *RULES):
        shown.add_column(name, justify="left" if name == "pair" else "right")
    for i in range(0, len(rows), len(RULES)):
        here = rows[i : i + len(RULES)]
        cells = (
            f"{row['committed_per_step']:.2f}"
            + (f" ({row['more_than_likeliest'] / row['standard_error']:+.1f})" if row["rule"] != LIKELIEST else "")
            for row in here
        )
        shown.add_row(here[0]["pair"], str(here[0]["temperature"]), *cells)
    return shown


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.measure_rejection", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--texts", type=int, default=36)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=list(TEMPERATURES))
    parser.add_argument(
        "--output", type=Path, help="the JSON file (launch/results/<date>-<machine>-<commit>-rejection.json)"
    )
    options = parser.parse_args(arguments)
    console = Console(width=140)
    places = [(name, temperature) for name in options.pairs for temperature in options.temperatures]
    rows = [row for name, temperature in places for row in measure(name, temperature, options, console)]
    console.print(table(rows))
    command = shlex.join(["python", "-m", "launch.measure_rejection", *arguments])
    print(write(head("rejection", command) | {"rows": rows}, options.output or tiny.RESULTS / file_name("rejection")))


if __name__ == "__main__":
    main()
