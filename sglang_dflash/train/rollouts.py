"""Rollouts: answers of a server with the features of their tokens, so that the trainer need not run the target.

A line of the file is an answer of SGLang's `/generate` to a request with `return_hidden_states` and
`return_prompt_token_ids`, unchanged:
    {"prompt_token_ids": [...], "output_ids": [...], "meta_info": {"hidden_states": [...], ...}, ...}
The server returns features with SGLANG_DFLASH_HIDDEN_STATES=features.

Entry i of `hidden_states` belongs to output token i. If a decode step gave this token, the entry is one row: that of
the token before. If a prefill gave it, the entry is a list with a row for each token that the prefill read. In both
cases the last row is that of the token before output token i. The first prefill reads the prompt. After a retraction a
prefill reads the prompt and the answer so far.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_dflash.cli import read_text
from sglang_dflash.train.chat import parsed
from sglang_dflash.train.features import Reading
from sglang_dflash.train.text import has_labels, require_usable
from sglang_dflash.train.tokens import Rows, Tokens

KEYS = ("prompt_token_ids", "output_ids", "meta_info")
CURE = "start the server with --disable-radix-cache --chunked-prefill-size -1"
Entries = Sequence[list[float] | list[list[float]]]


class Rollouts(NamedTuple):
    """Documents with their features. The last token of a rollout has zeros, because no row was computed for it."""

    documents: list[Tokens]
    features: list[torch.Tensor]  # [tokens, C] of each document

    def read(self, rows: Rows) -> Reading:
        """Return choices and features of rows that are whole documents. The choices are the text's own tokens."""
        features_RLC = self.features[0].new_zeros(*rows.ids_RL.shape, self.features[0].shape[1])
        for r, document in enumerate(rows.document_R.tolist()):
            features_RLC[r, : len(self.features[document])] = self.features[document]
        choices_RL = torch.nn.functional.pad(rows.ids_RL[:, 1:], (0, 1))
        return choices_RL, features_RLC.to(rows.ids_RL.device)

    @property
    def digest(self) -> str:
        """Return a digest of the features, 16 hex digits."""
        digest = sha256()
        for features_TC in self.features:
            digest.update(features_TC.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def require_size(self, n_features: int) -> None:
        """Check the number of values of a row, or raise ValueError."""
        found = self.features[0].shape[1]
        if found != n_features:
            raise ValueError(
                f"the rollouts have {found} features per token, and --target-layer-ids have {n_features}; give the "
                "layers of the draft that was served"
            )


def read_rollouts(path: Path, max_length: int, dtype: torch.dtype) -> Rollouts:
    """Return the rollouts of a .jsonl file, split into pieces of at most `max_length` tokens.

    Pieces without two consecutive answer tokens are left out.

    Args:
        dtype: dtype in which features are kept.

    Raises:
        ValueError: a line cannot be used, lines have unequal numbers of features, or fewer than two pieces remain.
    """
    documents, features = list[Tokens](), list[torch.Tensor]()
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            whole, features_TC = rollout_of(parsed(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        for first in range(0, len(whole.ids), max_length):
            span = slice(first, first + max_length)
            piece = Tokens(whole.ids[span], whole.is_response[span])
            if has_labels(piece):
                documents.append(piece)
                features.append(features_TC[span].to(dtype))
    require_usable(documents, path, max_length, "add rollouts")
    if len(sizes := {features_TC.shape[1] for features_TC in features}) > 1:
        raise ValueError(f"{path} has rows of {sorted(sizes)} features; keep the lines of one server")
    return Rollouts(documents, features)


def rollout_of(row: Any) -> tuple[Tokens, torch.Tensor]:
    """Return the tokens of a line and their features [tokens, C], or raise ValueError."""
    if not isinstance(row, dict) or not row.keys() >= set(KEYS):
        raise ValueError(f"found {str(row)[:60]!r}; send return_prompt_token_ids to /generate, and give its answers")
    prompt, answer = row["prompt_token_ids"], row["output_ids"]
    features_TC = features_of(len(prompt), row["meta_info"].get("hidden_states", ()))
    if len(features_TC) != len(prompt) + len(answer) - 1:
        raise ValueError(f"{len(answer)} output_ids do not fit the hidden states; give the answer as it was returned")
    tokens = Tokens(prompt + answer, [False] * len(prompt) + [True] * len(answer))
    return tokens, torch.nn.functional.pad(features_TC, (0, 0, 0, 1))


def features_of(n_prompt: int, hidden_states: Entries) -> torch.Tensor:
    """Return the features of a prompt of `n_prompt` tokens and its answer, without the last token, fp32 [T, C].

    Args:
        hidden_states: `meta_info["hidden_states"]` of the answer.

    Raises:
        ValueError: rows are missing.
    """
    if not all(isinstance(entry, list) for entry in hidden_states):
        raise ValueError('found the hidden states of one token; send "return_hidden_states": true')
    rows = dict[int, list[float]]()
    for last, entry in enumerate(hidden_states, start=n_prompt - 1):
        found: list[Any] = entry if isinstance(entry[0], list) else [entry]
        rows |= zip(range(last + 1 - len(found), last + 1), found, strict=True)
    n_tokens = n_prompt + len(hidden_states) - 1
    if not hidden_states or rows.keys() != set(range(n_tokens)):
        first = min(rows, default=0)
        raise ValueError(
            f"found {len(rows)} rows of hidden states from position {first} on, and the first {n_tokens} positions "
            f"need one each; {CURE}"
        )
    return torch.tensor([rows[position] for position in range(n_tokens)])
