"""What a request may ask for. Refused here means: the client gets a 400 with this sentence, nothing is dropped."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req

from sglang_dflash.version import __version__


def refusal(req: Req) -> str | None:
    """Why this request cannot be served exactly, or None."""
    wanted = [name for name, asked in asked_for(req).items() if asked]
    if not wanted:
        return None
    return (
        f"sglang-dflash {__version__} does not support {', '.join(wanted)} with DFLASH speculation; leave it out, "
        "or start the server without --speculative-algorithm"
    )


def asked_for(req: Req) -> dict[str, bool]:
    """What returns rows that a step does not keep: the target's last hidden state, the sampler's support."""
    return {
        "return_hidden_states": bool(req.return_hidden_states),
        "return_sampling_mask": bool(req.return_sampling_mask),
    }
