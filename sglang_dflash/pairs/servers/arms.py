"""Arms of a benchmark: the servers that it starts and compares. They differ in speculation and environment.

    off      no speculation
    mtp      drafts of the target's own MTP layers
    stock    SGLang's DFLASH worker
    ours     this plugin's worker

`NAME:VAR=VALUE,VAR=VALUE` is an arm with additional environment variables. Flags are those of `python -m
sglang.launch_server`, as in a model card. Flags that do not begin with `--speculative-` apply to all arms.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import hf_hub_download

from sglang_dflash.engine.draft.files import NOT_FETCHED, is_hub_name, no_directory, read_object
from sglang_dflash.flags import Worker
from sglang_dflash.pairs.servers.document import portable
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.server import Server

# Text in the log of every server with this plugin's DFLASH worker, and of no other server.
ANNOUNCEMENT = " serves DFLASH: "
OFF, MTP, STOCK, OURS = ARMS = ("off", "mtp", "stock", "ours")
SERVE = (sys.executable, "-m", "sglang.launch_server")
SPECULATIVE = "--speculative-"
# Fields of config.json that give the number of MTP layers. With these layers a target drafts for itself.
MTP_FIELDS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


class ServerCommand(NamedTuple):
    """Command that starts one arm's server."""

    name: str
    command: tuple[str, ...]  # without host and port
    env: Mapping[str, str]  # added to this process's environment
    ours: bool  # the server must run this plugin's worker


def launches(
    names: Sequence[str], flags: Sequence[str], *, mtp_steps: int, env: Mapping[str, str] = {}
) -> list[ServerCommand]:
    """Return the commands of arms in the order of `ARMS`.

    Args:
        names: names of the arms; empty: all arms that the model supports.
        flags: flags of a DFLASH server.
        mtp_steps: drafts per step of the arm `mtp`.
        env: environment variables of all arms.

    Raises:
        ValueError: the flags name no model or not DFLASH, or the model's config.json is not available. Or an arm is
            unknown, has an invalid environment, or needs MTP layers that the model lacks. Or two arms have equal names
            after `portable` has shortened the paths in them.
    """
    model = value_of("--model-path", flags) or value_of("--model", flags)
    if model is None:
        raise ValueError(
            "the flags after -- have no --model-path; add it (these flags replace all server flags of a --preset)"
        )
    if (value_of("--speculative-algorithm", flags) or "").upper() != "DFLASH":
        raise ValueError("the flags after -- have no --speculative-algorithm DFLASH; add the flags of the model card")
    level = value_of("--log-level", flags) or "info"
    if level.lower() not in ("debug", "info"):
        raise ValueError(f"--log-level {level} hides the log line that names the worker; drop it, or give info")
    kinds = {name: kind_of(name) for name in names}
    has_mtp = mtp_layers(model) > 0 if not names or MTP in kinds.values() else False
    if MTP in kinds.values() and not has_mtp:
        raise ValueError(f"--arms {MTP}: {model} has no MTP layers (config.json: {' or '.join(MTP_FIELDS)}); drop it")
    kinds = kinds or {kind: kind for kind in ARMS if has_mtp or kind != MTP}
    found = [
        launch(name, flags, mtp_steps=mtp_steps, env=env)
        for name in sorted(kinds, key=lambda name: ARMS.index(kinds[name]))
    ]
    shown = [one.name for one in found]
    if len(set(shown)) < len(shown):
        raise ValueError(
            f"--arms: two arms have the same name once paths are shortened ({', '.join(shown)}); rename a folder"
        )
    return found


def launch(name: str, flags: Sequence[str], *, mtp_steps: int, env: Mapping[str, str] = {}) -> ServerCommand:
    kind, plain, env = kind_of(name), without_speculation(flags), {**env, **environment_of(name)}
    shown = portable(name)
    if kind == OFF:
        return ServerCommand(shown, (*SERVE, *plain), env, ours=False)
    if kind == MTP:
        return ServerCommand(shown, (*SERVE, *plain, *mtp_flags(mtp_steps)), env, ours=False)
    worker = Worker.PLUGIN if kind == OURS else Worker.STOCK
    return ServerCommand(shown, (*SERVE, *flags), {"SGLANG_DFLASH_WORKER": str(worker), **env}, ours=kind == OURS)


def kind_of(arm: str) -> str:
    """Return the kind of an arm, one of `ARMS`, or raise ValueError."""
    kind = arm.partition(":")[0]
    if kind not in ARMS:
        raise ValueError(f"--arms {arm}: there is no arm {kind!r}; use {', '.join(ARMS)}, or NAME:VAR=VALUE")
    return kind


def environment_of(arm: str) -> dict[str, str]:
    """Return the environment after an arm's name. A comma separates variables if a name and `=` follow it.

    Raises:
        ValueError: the text after the colon does not begin with VAR=VALUE, or sets PYTHONPATH.
    """
    _, colon, text = arm.partition(":")
    parts = re.split(r",(?=[A-Za-z_]\w*=)", text) if colon else []
    if not all(re.match(r"[A-Za-z_]\w*=", part) for part in parts):
        raise ValueError(f"--arms {arm}: {text!r} does not begin with VAR=VALUE; write NAME:VAR=VALUE,VAR=VALUE")
    env = dict(part.split("=", 1) for part in parts)
    if "PYTHONPATH" in env:  # an editable installation would still import its own kernels
        raise ValueError(
            f"--arms {arm}: an arm may not set PYTHONPATH, because an editable installation would keep its kernels; to "
            "compare checkouts, install each in an environment of its own, and run the benchmark in each"
        )
    return env


def mtp_flags(n_steps: int) -> tuple[str, ...]:
    """Return the flags for speculation with the target's MTP layers: a chain of `n_steps` drafts, and the bonus."""
    return (
        *("--speculative-algorithm", "NEXTN"),
        *("--speculative-num-steps", str(n_steps)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(n_steps + 1)),
    )


def without_speculation(flags: Sequence[str]) -> list[str]:
    kept, dropping = [], False
    for word in flags:
        if word.startswith("--"):
            dropping = word.startswith(SPECULATIVE)
        if not dropping:
            kept.append(word)
    return kept


def value_of(flag: str, flags: Sequence[str]) -> str | None:
    """Return the value of the last `--flag value` or `--flag=value`; None without one."""
    found = None
    for i, word in enumerate(flags):
        if word == flag and i + 1 < len(flags):
            found = flags[i + 1]
        elif word.startswith(f"{flag}="):
            found = word.split("=", 1)[1]
    return found


def mtp_layers(model: str) -> int:
    """Return the number of MTP layers of `model`, which is a directory or a repository id.

    Raises:
        ValueError: the model's config.json is not available, or contains no JSON object.
    """
    file = Path(model) / "config.json"
    if not (Path(model).exists() or is_hub_name(model)):
        raise ValueError(f"--model-path {no_directory(model)}")
    try:
        file = file if Path(model).exists() else Path(hf_hub_download(model, "config.json"))
    except NOT_FETCHED as error:
        raise ValueError(
            f"--model-path {model} is no directory and cannot be fetched ({type(error).__name__}); give a checkpoint "
            "directory, or a repository id that this machine can reach. If it is private or gated, run `hf auth login` "
            "first"
        ) from None
    if not file.is_file():
        raise ValueError(f"--model-path {model} has no config.json; give a checkpoint directory")
    config: dict[str, Any] = read_object(file, "fetch the model again")
    text = config.get("text_config") or {}
    return max(int(part.get(field) or 0) for part in (config, text) for field in MTP_FIELDS)


def require_worker(server: Server, *, ours: bool) -> None:
    """Check that the server runs this plugin's worker if `ours`, and another worker or none if not.

    Raises:
        ServerError: the server's log shows the opposite.
    """
    serves = ANNOUNCEMENT in server.log_text()
    if serves and not ours:
        raise ServerError(
            f"{server.name}: the worker of sglang-dflash serves this arm; drop SGLANG_DFLASH_WORKER from the arm's "
            f"variables ({server.log})"
        )
    if ours and not serves:
        raise ServerError(
            f"{server.name}: the worker of sglang-dflash does not serve this arm, or its log line is missing "
            f"({server.log}); see that it is installed for {sys.executable}, and leave out SGLANG_PLUGINS, "
            "SGLANG_DFLASH_WORKER and --log-level"
        )
