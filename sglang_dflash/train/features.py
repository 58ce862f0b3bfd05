"""Argmax tokens (choices) and features of the target for each token of the training text: computed, or cached on disk.

A cache stores both for every document, so the target reads each document only once. The cache also stores its settings
(target, text, layers, dtype), and is rejected if they differ from the run's. If filling the cache is interrupted, the
next run continues with the missing documents.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn
from transformers import PreTrainedModel

from sglang_dflash.reference.torch.target import states_of, target_features
from sglang_dflash.train.loop import differing
from sglang_dflash.train.ranks import Ranks
from sglang_dflash.train.text import padded
from sglang_dflash.train.tokens import Rows, Tokens, text_digest

Reading = tuple[torch.Tensor, torch.Tensor]  # int64 [R, L], the target's argmax after each token; features [R, L, C]
Read = Callable[[Rows], Reading]

# Tokens that the target reads at once. For a vocabulary of 49,152 tokens their bf16 logits take 200 MB.
TOKENS_AT_ONCE = 2048
FACTS, FEATURES, CHOICES, DONE = "cache.json", "features.bin", "choices.bin", "done.bin"


@torch.no_grad()
def read_rows(target: PreTrainedModel, rows: Rows, layer_ids: Sequence[int]) -> Reading:
    """Return the target's choices and features for `rows`, which must be on the target's device."""
    out, states = states_of(target, input_ids=rows.ids_RL, use_cache=False)
    return out.logits.argmax(-1), target_features(states, layer_ids)


def weights_digest(module: nn.Module) -> str:
    """Return a digest of a module's weights, 16 hex digits, from at most about 2,000 values of each tensor."""
    digest = sha256()
    for name, parameter in sorted(module.named_parameters()):
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 1024)].contiguous().cpu()
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class FeatureCache:
    """Choices and features of documents, in memory-mapped files of `folder`. Features are stored in `dtype`."""

    def __init__(
        self,
        folder: Path,
        documents: Sequence[Tokens],
        target: PreTrainedModel,
        layer_ids: Sequence[int],
        *,
        dtype: torch.dtype,
    ) -> None:
        self.folder = folder
        self.documents = documents
        self.target = target
        self.layer_ids = tuple(layer_ids)
        self.dtype = dtype
        self.first_of = [0, *accumulate(len(document.ids) for document in documents)]
        self.feature_size = len(self.layer_ids) * target.config.get_text_config().hidden_size

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files in bytes, by name."""
        n_tokens = self.first_of[-1]
        return {
            FEATURES: n_tokens * self.feature_size * self.dtype.itemsize,
            CHOICES: n_tokens * torch.int32.itemsize,
            DONE: len(self.documents),
        }

    @property
    def facts(self) -> dict[str, Any]:
        """Return the settings on which the files' contents depend."""
        return {
            "target": weights_digest(self.target),
            "text": text_digest(self.documents),
            "target_layer_ids": list(self.layer_ids),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def prepare(self, say: Callable[[str], None]) -> None:
        """Create the files, or check that existing files were made with the same settings (`facts`).

        Args:
            say: prints a line for the user.

        Raises:
            ValueError: existing files were made with other settings, or the disk has no room.
        """
        n_bytes, facts = sum(self.sizes.values()), self.facts
        if (self.folder / FACTS).exists():
            if other := differing(json.loads((self.folder / FACTS).read_text()), facts):
                raise ValueError(
                    f"cache {self.folder} was made with other settings ({other}); "
                    "repeat the old options, or give another folder, or delete this one"
                )
            say(f"cache {self.folder}: found, {shown_bytes(n_bytes)}")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        say(
            f"cache {self.folder}: {self.first_of[-1]:,} tokens x ({self.feature_size:,} features x "
            f"{self.dtype.itemsize} bytes + 4) = {shown_bytes(n_bytes)}; {shown_bytes(free)} are free"
        )
        if n_bytes > free:
            raise ValueError(
                f"cache {self.folder} needs {shown_bytes(n_bytes)} and {shown_bytes(free)} are free; "
                "give less text or fewer --target-layer-ids, or train without --cache"
            )
        for name, size in self.sizes.items():
            with (self.folder / name).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # so a full disk fails here, not as SIGBUS later
        (self.folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")

    def fill(self, ranks: Ranks) -> None:
        """Run the target over the missing documents. Each process takes its share of all documents."""
        features_TC, choices_T, done = self._mapped
        missing = [i for i in range(ranks.rank, len(self.documents), ranks.n) if not done[i]]
        batches = list(self._batches(missing))
        for batch in track(batches, "target reads", disable=not (ranks.is_first and missing)):
            rows = padded([self.documents[i] for i in batch], pad_id=0).to(self.target.device)
            choices_RL, features_RLC = read_rows(self.target, rows, self.layer_ids)
            for r, i in enumerate(batch):
                span = slice(self.first_of[i], self.first_of[i + 1])
                features_TC[span] = features_RLC[r, : span.stop - span.start].cpu()
                choices_T[span] = choices_RL[r, : span.stop - span.start].cpu()
                done[i] = 1
        ranks.wait()

    def _batches(self, documents: list[int]) -> Iterator[list[int]]:
        """Group documents of similar length. A batch has at most TOKENS_AT_ONCE padded tokens, or one document."""
        batch: list[int] = []
        for i in sorted(documents, key=lambda i: len(self.documents[i].ids)):
            if batch and (len(batch) + 1) * len(self.documents[i].ids) > TOKENS_AT_ONCE:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def read(self, rows: Rows) -> Reading:
        """Return the cached result of `read_rows`, with zeros at padding. Each row must be a whole document."""
        features_TC, choices_T, _ = self._mapped
        features_RLC = torch.zeros(*rows.ids_RL.shape, self.feature_size, dtype=self.dtype)
        choices_RL = torch.zeros(rows.ids_RL.shape, dtype=torch.int64)
        for r, document in enumerate(rows.document_R.tolist()):
            span = slice(self.first_of[document], self.first_of[document + 1])
            features_RLC[r, : span.stop - span.start] = features_TC[span]
            choices_RL[r, : span.stop - span.start] = choices_T[span]
        return choices_RL.to(rows.ids_RL.device), features_RLC.to(rows.ids_RL.device)

    @cached_property
    def _mapped(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtypes = {FEATURES: self.dtype, CHOICES: torch.int32, DONE: torch.uint8}
        features, choices, done = (
            torch.from_file(str(self.folder / name), shared=True, size=self.sizes[name] // dtype.itemsize, dtype=dtype)
            for name, dtype in dtypes.items()
        )
        return features.view(-1, self.feature_size), choices, done


def shown_bytes(n: int) -> str:
    """Format a number of bytes in decimal units: `12.3 GB`."""
    value, unit = float(n), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if unit != "bytes" else f"{n} bytes"
