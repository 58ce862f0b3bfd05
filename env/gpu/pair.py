"""Answers of SmolLM2-135M-Instruct, and DFlash 2 drafts trained on them, within a time limit. `b.sh` runs this module.

Environment: CARRIED (folders that `pack.py` wrote, separated by blanks; without it the target comes from PyPI, and only
user turns are answered) and EAGER (1: no CUDA graph). Writes $OUT/b.json after every part, and each draft as an archive
in pieces: `cat draft8.tar.* | tar x`. Everything else lies in $WORK, from which a repeated run continues.
"""

import io
import json
import lzma
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from env.gpu.clock import Clock, Document
from env.gpu.dry import is_dry
from sglang_dflash.pairs.servers import document
from sglang_dflash.pairs.smollm2 import smollm2
from sglang_dflash.pairs.tiny.pairs import ASSETS
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.tools.bench.prompts import CHATS_FILE
from sglang_dflash.train.answers import whole_lines
from sglang_dflash.train.chat import rendered_prompt
from sglang_dflash.train.draft import Data, Settings, draft_config_for, train_draft
from sglang_dflash.train.evaluation import Answers
from sglang_dflash.train.from_model import ModelSource
from sglang_dflash.train.loop import TrainRecipe
from sglang_dflash.train.prompts import write_prompts
from sglang_dflash.train.runs import load_target
from sglang_dflash.train.sizes import Second
from sglang_dflash.train.text import Batches
from sglang_dflash.train.tokens import Tokens, text_digest
from sglang_dflash.train.writer import StaticWriter

SHIPPED = ASSETS / "smollm2" / "draft"
LAYER_IDS, MASK = (2, 8, 14, 20, 27), 12  # feature layers and mask token of the shipped draft
SECOND = Second(selector_rank=32)
IS_EAGER = os.environ.get("EAGER") == "1"
PIECE = 15 * 2**20  # bytes of a piece of an archive
CHUNK = 16384  # prompts answered before the next ones; each chunk captures the graphs of its shapes


class Sizes(NamedTuple):
    """Sizes of a run."""

    turns: int  # user turns that the target writes
    tasks: int  # largest number of prompts from CARRIED
    at_once: int  # prompts per batch
    new_tokens: int  # per answer
    enough: int  # number of answer tokens at which the part "answers" ends early
    layers: int  # of the drafts
    rows: int  # documents per training step
    anchors: int  # blocks per document
    evaluated: int  # prompts per set
    evaluated_tokens: int  # per answer to them
    report_every: int
    save_seconds: float
    enough_documents: int  # answers without which no draft is trained
    least_s: float  # seconds that the answers and each training get in any case
    # Fractions of the time limit at which the answers and each training end.
    answers_end: float
    ends: tuple[tuple[int, float], ...]  # (block size, fraction)


GPU = Sizes(
    turns=12_000, tasks=30_000, at_once=512, new_tokens=256, enough=8_000_000, layers=2, rows=48, anchors=64,
    evaluated=24, evaluated_tokens=128,
    report_every=500, save_seconds=30.0, enough_documents=1000, least_s=30.0,
    answers_end=0.36, ends=((8, 0.68), (16, 0.87)),
)  # fmt: skip
DRY = Sizes(
    turns=4, tasks=8, at_once=4, new_tokens=12, enough=1_000_000, layers=3, rows=2, anchors=4,
    evaluated=1, evaluated_tokens=12,
    report_every=2, save_seconds=1.0, enough_documents=3, least_s=3.0,
    answers_end=0.6, ends=((8, 0.0), (16, 0.0)),
)  # fmt: skip


def carried(pattern: str) -> list[Path]:
    """Return the files in the folders of CARRIED that match, in the order of their names."""
    folders = map(Path, os.environ.get("CARRIED", "").split())
    return sorted((path for folder in folders for path in folder.glob(pattern)), key=lambda path: path.name)


def write_target(folder: Path) -> Path:
    """Write the target's checkpoint into `folder` if it is missing, and return its path.

    Raises:
        ValueError: CARRIED is set, and its folders have no weights.
    """
    out = folder / smollm2.NAME
    if out.exists():
        return out
    pieces = carried("gguf.xz.*")
    if not pieces:
        if os.environ.get("CARRIED"):
            raise ValueError(f"CARRIED={os.environ['CARRIED']} has no gguf.xz.*; give folders that pack.py wrote")
        return smollm2.checkpoint(folder)
    part = folder / "target.part"
    shutil.rmtree(part, ignore_errors=True)
    gguf = folder / "target.gguf"
    gguf.write_bytes(lzma.decompress(b"".join(piece.read_bytes() for piece in pieces)))
    smollm2.convert(gguf, part)
    part.rename(out)
    gguf.unlink()
    return out


class Pair:
    """Work of this script: a target, its answers, and drafts."""

    def __init__(self, sizes: Sizes, clock: Clock, out: Document, work: Path) -> None:
        self.sizes, self.clock, self.out, self.work = sizes, clock, out, work
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.documents: list[Tokens] = []

    def load(self) -> None:
        path = write_target(self.work)
        self.out.fields["target"] = str(path)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        self.target = load_target(str(path), torch.bfloat16, self.device)
        self.target.requires_grad_(False).eval()
        self.source = ModelSource(self.target, self.tokenizer, self.sizes.at_once)
        self.out.fields["writer"] = self.source.writer.name

    def run(self) -> None:
        """Run all parts, each if its time has not passed. Without a target or enough answers no draft is trained."""
        part, limit_s = self.out.part, self.clock.limit_s
        part("target", 20.0, self.load)
        if not self.out.fields.get("target"):
            return
        if IS_EAGER:  # turns would take too long
            self.out.leave_out("turns")
        else:
            part("turns", 20.0, self.write_turns)
        if "turns" in self.out.fields["failed"] and self.source.writer.captures:
            self.start_again_eagerly()
        part("answers", 20.0, partial(self.write_answers, self.sizes.answers_end * limit_s))
        part("documents", 5.0, self.read_documents)
        if len(self.documents) < self.sizes.enough_documents:
            return self.out.fail("documents", f"{len(self.documents)} answers are too few to train on")
        part("shipped", 10.0, partial(self.measure, "shipped", SHIPPED))
        start = SHIPPED
        for block_size, end in self.sizes.ends:
            name = f"draft{block_size}"
            part(name, self.sizes.least_s, partial(self.train, block_size, end * limit_s, start))
            if (self.work / name / "model.safetensors").exists():
                part(f"{name}, acceptance", 10.0, partial(self.measure, name, self.work / name))
                start = self.work / name

    def start_again_eagerly(self) -> None:
        """Replace this process by one without CUDA graphs. After a failed capture a process cannot be trusted."""
        print("starting again without a CUDA graph", flush=True)
        os.environ["EAGER"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "env.gpu.pair"])

    # -- answers ------------------------------------------------------------------------------------------------------

    def write_turns(self) -> None:
        """Let the target write user turns, unless an earlier run has done so."""
        complete = self.work / "turns.complete"
        if not complete.exists():
            n = self.sizes.turns
            write_prompts(self.source, self.tokenizer, [], self.work / "turns.jsonl", turns=n, n_tasks=0, seed=1)
            complete.touch()

    @cached_property
    def prompt_ids(self) -> list[list[int]]:
        """Return the tokens of all prompts, each with the header of its answer."""
        texts = [rendered_prompt(line, self.tokenizer) for line in self.prompts()]
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def prompts(self) -> list[dict[str, Any]]:
        """Return the tasks of CARRIED and the user turns, without prompts of the evaluated sets."""
        texts = [lzma.decompress(path.read_bytes()).decode() for path in carried("prompts.jsonl.xz")]
        tasks = [line for text in texts for line in text.split("\n") if line]
        turns_file = self.work / "turns.jsonl"
        turns = turns_file.read_text().splitlines() if turns_file.exists() else []
        chats = {json.loads(line)["prompt"] for line in CHATS_FILE.read_text().splitlines()}
        found = [json.loads(line) for line in (*tasks[: self.sizes.tasks], *turns)]
        return [line for line in found if line["messages"][0]["content"] not in chats]

    def write_answers(self, end_s: float) -> None:
        """Let the target answer prompts, every second one at temperature 0.7, until the time for this part is up.

        Drafts are trained on these answers, so a repeated run adds none once there were enough.
        """
        path, complete, ids = self.work / "answers.jsonl", self.work / "answers.complete", self.prompt_ids
        if complete.exists():
            return
        began_s, n_tokens = self.clock.passed_s(), 0
        end_s = max(end_s, began_s + self.sizes.least_s)
        done = {json.loads(line)["prompt"] for line in (whole_lines(path) if path.exists() else ())}
        missing = [i for i in range(len(ids)) if i not in done]
        Random(len(done)).shuffle(missing)
        with path.open("a", buffering=1) as file:
            for prompt, answer in self.answered(ids, missing, seed=len(done)):
                file.write(json.dumps({"prompt": prompt, "ids": answer}) + "\n")
                n_tokens += len(answer)
                if self.clock.passed_s() > end_s or n_tokens > self.sizes.enough:
                    break
        seconds = self.clock.passed_s() - began_s
        self.out.fields["answers"] = {"new_tokens": n_tokens, "seconds": round(seconds, 1), "prompts": len(ids)}
        if len(whole_lines(path)) >= self.sizes.enough_documents:
            complete.touch()

    def answered(self, ids: list[list[int]], wanted: list[int], seed: int) -> Iterator[tuple[int, list[int]]]:
        """Yield numbers of prompts with their answers' tokens.

        Chunks of prompts are answered one after another. Within a chunk prompts of similar length are answered
        together, so an early end may leave out some lengths of the last chunk.
        """
        for first in range(0, len(wanted), CHUNK):
            chunk = wanted[first : first + CHUNK]
            heats = [0.7 * (i % 2) for i in chunk]
            asked = [ids[i] for i in chunk], heats, self.sizes.new_tokens, self.source.stop_ids
            for row in self.source.generate(*asked, seed=seed + first):
                yield chunk[row.prompt], [*row.ids, *([self.tokenizer.eos_token_id] if row.stopped else [])]

    def read_documents(self) -> None:
        """Read all answers, also those that were written before a failure."""
        path, ids = self.work / "answers.jsonl", self.prompt_ids
        lines = [json.loads(line) for line in (whole_lines(path) if path.exists() else ())]
        self.documents = [
            Tokens([*ids[line["prompt"]], *line["ids"]], [False] * len(ids[line["prompt"]]) + [True] * len(line["ids"]))
            for line in lines
            if len(line["ids"]) > 1
        ]
        n_tokens = sum(len(line["ids"]) for line in lines)
        self.out.fields["documents"] = {"answers": len(self.documents), "tokens": n_tokens, "prompts": len(ids)}

    # -- drafts -------------------------------------------------------------------------------------------------------

    def train(self, block_size: int, end_s: float, start: Path) -> None:
        """Train a draft until `end_s` seconds of the time limit, beginning with the draft in `start`.

        A draft is in $WORK as soon as its training is over, and then never trained further.
        """
        sizes, name = self.sizes, f"draft{block_size}"
        folder, chosen = self.work / f"training{block_size}", self.work / f"minutes{block_size}"
        if (self.work / name).exists():
            return write_pieces(self.work / name, self.out.path.parent)  # an interrupted run may have written none
        config = draft_config_for(
            self.target,
            n_layers=sizes.layers,
            block_size=block_size,
            mask_token_id=MASK,
            target_layer_ids=LAYER_IDS,
            second=SECOND,
        )
        batches = Batches(self.documents, n_rows=sizes.rows, pad_id=self.tokenizer.pad_token_id, seed=block_size)
        data = Data(batches.at, batches.held_out, [], facts={"text": text_digest(self.documents), "rows": sizes.rows})
        if not chosen.exists():  # a repeated run must not change the time limit of a training
            chosen.write_text(str(max(sizes.least_s, end_s - self.clock.passed_s()) / 60))
        recipe = TrainRecipe(
            steps=1,
            learning_rate=1e-3,
            warmup_steps=50,
            report_every=sizes.report_every,
            save_seconds=sizes.save_seconds,
            minutes=float(chosen.read_text()),
        )
        settings = Settings(n_anchors=sizes.anchors, start=str(start))
        train_draft(self.target, config, data, recipe, out=folder, settings=settings, dtype=torch.bfloat16)
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        self.out.fields[name] = {"start": start.name, "layers": sizes.layers, "log": log}
        copy_draft(folder, self.work / name)
        write_pieces(self.work / name, self.out.path.parent)

    @cached_property
    def answers(self) -> dict[str, Answers]:
        """Return the target's greedy answers to the first prompts of each evaluated set."""
        found = {}
        for path in carried("sets/*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()[: self.sizes.evaluated]]
            texts = [rendered_prompt(line, self.tokenizer) for line in lines]
            ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            found[path.stem] = Answers(self.target, ids, self.sizes.evaluated_tokens)
        return found

    def measure(self, name: str, folder: Path) -> None:
        """Measure a draft's acceptance length and acceptance by slot in each evaluated set."""
        draft = DraftModel.from_pretrained(folder, dtype=torch.float32, device=self.device)
        found = {task: answers.acceptance(draft)._asdict() for task, answers in self.answers.items()}
        self.out.fields["acceptance"][name] = found
        lengths = ", ".join(f"{task} {one['tokens_per_step']:.2f}" for task, one in found.items())
        print(f"  {name}: {lengths}", flush=True)


def copy_draft(folder: Path, out: Path) -> None:
    """Copy a draft's checkpoint, without the state of its training. `out` appears when it is whole."""
    part = out.with_name(f"{out.name}.part")
    part.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(folder / name, part / name)
    part.rename(out)


def write_pieces(folder: Path, out: Path) -> None:
    """Write a folder's archive to `out` in pieces of at most `PIECE` bytes."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(folder, folder.name)
    for i, first in enumerate(range(0, len(whole := archive.getvalue()), PIECE)):
        (out / f"{folder.name}.tar.{i}").write_bytes(whole[first : first + PIECE])


def main() -> int:
    sizes, clock = DRY if is_dry() else GPU, Clock.from_environment()
    work, out = Path(os.environ["WORK"]), Path(os.environ["OUT"])
    StaticWriter.may_capture = not IS_EAGER
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would build a plan for every new length, which takes longer
    about = {"machine": "a CPU, small sizes"} if is_dry() else {}
    fields = {**document.head("answers and drafts of SmolLM2-135M-Instruct", "env/gpu/b.sh"), **about}
    written = Document(out / "b.json", clock, **fields, sizes=sizes._asdict(), acceptance={})
    written.save()
    pair = Pair(sizes, clock, written, work)
    pair.run()
    written.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
