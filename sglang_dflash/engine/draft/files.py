"""Access to a draft's files: `config.json`, and tensors or only their names, dtypes and shapes.

A draft is a directory or a Hugging Face repository id, as in SGLang. If a repository is not in the local cache,
`read_config` fetches only its config.json. `tensor_headers` fetches only the headers of its safetensors files.
`local_folder` downloads config.json and the whole safetensors files. `checkpoint.py` interprets the fields.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from httpx import TransportError
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from safetensors import SafetensorError, safe_open

from sglang_dflash.cli import nearest

Value = TypeVar("Value")
# Errors of `hf_hub_download`, if a file is neither in the cache nor on the hub, or the hub cannot be reached.
NOT_FETCHED = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, TransportError)
N_SAMPLES, SAMPLE = 256, 4096  # samples per weight file for a digest, and bytes per sample
MASK_EMBEDDING = "mask_embedding.pt"
MODELOPT_CONFIG = "hf_quant_config.json"
ROTARY = "rotary_emb.inv_freq"
# Names of tensors in Muse Glimmer's draft, with z-lab's names.
ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
DOMINO = ("prefix_gru.", "embed_proj.")  # prefixes of names that this package puts below `domino.`
# Unused tensors that some exporters save with a draft: the target's embedding, heads and norm. The trainer
# `speculators` also saves t2d and d2t, maps between the whole and a reduced vocabulary. A draft with a reduced
# vocabulary uses d2t.
BORROWED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t")


class Stored(NamedTuple):
    """Header of a tensor in a safetensors file."""

    dtype: str  # as in the file, for example F8_E4M3
    shape: tuple[int, ...]


def read_config(path: str, revision: str | None) -> dict[str, Any]:
    """Return `config.json` as written, without a library's defaults.

    Raises:
        ValueError: there is no such draft, the file cannot be fetched, or it is no JSON object.
    """
    file = _local_config(Path(path)) if Path(path).exists() else _hub_config(path, revision)
    return read_object(file, "fetch the draft again")


def is_hub_name(name: str) -> bool:
    """Return whether the hub can have a repository of this name, such as `org/model`. Other names are paths."""
    return name.count("/") <= 1 and not name.startswith(("/", ".", "~"))


def no_directory(path: str) -> str:
    """Return the end of an error for a path without a directory: the most similar directory beside it, or a cure."""
    parent = Path(path).expanduser().parent
    beside = [str(one) for one in parent.iterdir() if one.is_dir()] if parent.is_dir() else []
    cure = "; give a directory, or the id of a repository such as z-lab/Qwen3-8B-DFlash-b16"
    return f"{path} is no directory{nearest(path, beside, prefix=f'{parent}/') or cure}"


def extra_file(path: str, name: str, revision: str | None) -> Path | None:
    """Return a draft's file that only some drafts have; None: this draft has none, or it is not reachable."""
    file = Path(path) / name
    if not Path(path).exists():
        try:
            file = Path(hf_hub_download(path, name, revision=revision))
        except NOT_FETCHED:
            return None
    return file if file.is_file() else None


def read_object(file: Path, cure: str) -> dict[str, Any]:
    """Return the JSON object in `file`.

    Raises:
        ValueError: the file contains no JSON object; the message ends with `cure`.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON ({error}); {cure}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, not an object; {cure}")
    return found


def tensor_headers(path: str, revision: str | None) -> dict[str, Stored]:
    """Return the header of every tensor of the draft by name, without an exporter's name prefix (see `own_names`).

    Raises:
        ValueError: the draft has no safetensors files, one of them is missing, is damaged or cannot be fetched, or a
            tensor is stored twice.
    """
    folder = Path(path) if Path(path).exists() else _cached_snapshot(path, revision)
    return own_names(_local_headers(folder) if folder else _hub_headers(path, revision))


def identity(path: str, revision: str | None) -> tuple[str, str]:
    """Return a value that tells drafts apart, preceded by the value's name in messages.

    The value is a digest of a directory's files, or a repository's commit. The digest covers `config.json`, and of each
    weight file its size and `N_SAMPLES` equally spaced samples. Files of gigabytes are not read whole, so a change of a
    few weights between samples is not found.

    Raises:
        ValueError: see `read_config` and `weight_files`.
    """
    if not Path(path).exists():
        return "the draft's commit", _hub_config(path, revision).parent.name
    digest = sha256(_local_config(Path(path)).read_bytes())
    mask = extra_file(path, MASK_EMBEDDING, revision)
    for file in [*weight_files(Path(path)), *([mask] if mask else [])]:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as weights:
            for start in range(0, size, max(size // N_SAMPLES, SAMPLE)):
                weights.seek(start)
                digest.update(weights.read(SAMPLE))
    return "the digest of the draft's files", digest.hexdigest()[:16]


def own_name(stored: str) -> str:
    """Return a tensor's name without an exporter's prefix, in the words of this package."""
    name = stored.removeprefix("model.")
    return f"domino.{name}" if name.startswith(DOMINO) else ALIASES.get(name, name)


def own_names(files: Iterable[tuple[str, Mapping[str, Value]]]) -> dict[str, Value]:
    """Return the tensors by name without the prefix `model.`, which some exporters add, and without rotary tables.

    Args:
        files: pairs of a file's name, and its tensors or their shapes by name.
    Raises:
        ValueError: two tensors have the same name, so a loader would take either.
    """
    own, found_in = dict[str, Value](), dict[str, str]()
    for file, tensors in files:
        for stored, tensor in tensors.items():
            name = own_name(stored)
            if name.endswith(ROTARY):
                continue
            if name in own:
                raise ValueError(f"{name} is stored in {found_in[name]}, and as {stored} in {file}; remove one of them")
            own[name], found_in[name] = tensor, file
    return own


def local_folder(source: str | Path, revision: str | None = None) -> Path:
    """Return `source` if it is a folder, else the folder of the repository `source`, after downloading its files.

    Raises:
        OSError: there is no such folder or repository, it has no config.json, or it cannot be fetched.
    """
    folder = Path(source)
    if not folder.is_dir():
        if not is_hub_name(str(source)) or "/" not in str(source):
            raise FileNotFoundError(no_directory(str(source)))
        wanted = ["config.json", "*.safetensors", MASK_EMBEDDING, MODELOPT_CONFIG]
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=wanted))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; give the folder of a DFlash checkpoint")
    return folder


def write_tensors(folder: Path, tensors: Mapping[str, Any], save_file: Callable[..., None]) -> None:
    """Write model.safetensors with a framework's `save_file`, and give it the mode of the folder's config.json."""
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod((folder / "config.json").stat().st_mode)  # safetensors creates a file that only its owner may read


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a draft's directory.

    Raises:
        ValueError: there is no safetensors file, or the index of the files is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        cure = "fetch the draft again"
        names = read_object(index, cure).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"{index} has no weight_map from tensors to files; {cure}")
        return [folder / name for name in sorted(set(names.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    other = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern))
    if other:
        raise ValueError(
            f"{folder} has no *.safetensors, but {', '.join(other)}; convert these to safetensors if they hold the "
            "weights, else fetch the draft again"
        )
    raise ValueError(f"{folder} has a config.json and no *.safetensors; fetch the draft's weights")


# -- a directory ---------------------------------------------------------------------------------------------------


def _local_config(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"--speculative-draft-model-path {folder} is a file; give the draft's directory")
    if not (folder / "config.json").is_file():
        raise ValueError(f"--speculative-draft-model-path {folder} has no config.json; give a DFlash draft's directory")
    return folder / "config.json"


def _local_headers(folder: Path) -> Iterator[tuple[str, dict[str, Stored]]]:
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="numpy") as tensors:
                found = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
                headers = {name: Stored(one.get_dtype(), tuple(one.get_shape())) for name, one in found.items()}
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{file} cannot be read as safetensors ({error}); fetch the draft again") from None
        yield str(file), headers


# -- a repository --------------------------------------------------------------------------------------------------


def _hub_config(repository: str, revision: str | None) -> Path:
    if not is_hub_name(repository):
        raise ValueError(f"--speculative-draft-model-path {no_directory(repository)}")
    try:
        return Path(hf_hub_download(repository, "config.json", revision=revision))
    except RevisionNotFoundError:
        cure = "correct --speculative-draft-model-revision"
        raise ValueError(f"{repository} has no revision {revision}; {cure}") from None
    except NOT_FETCHED as error:
        raise ValueError(
            f"--speculative-draft-model-path {repository} is no directory and cannot be fetched "
            f"({type(error).__name__}); give a directory, or the id of a repository with a config.json. Without a "
            f"network, run `hf download {repository}` elsewhere first; if it is private or gated, `hf auth login`"
        ) from None


def _cached_snapshot(repository: str, revision: str | None) -> Path | None:
    try:
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def _hub_headers(repository: str, revision: str | None) -> Iterator[tuple[str, dict[str, Stored]]]:
    which = repository if revision is None else f"{repository} --revision {revision}"
    try:
        files = HfApi().get_safetensors_metadata(repository, revision=revision).files_metadata
    except NotASafetensorsRepoError:
        raise ValueError(
            f"{repository} has no model.safetensors and no index of one; if it has other *.safetensors, run "
            f"`hf download {which}`, else convert its weights. If it is private, run `hf auth login` first"
        ) from None
    except SafetensorsParsingError as error:
        raise ValueError(f"{repository}: its weights are damaged ({error}); give another draft or revision") from None
    except (HfHubHTTPError, OfflineModeIsEnabled, TransportError) as error:
        raise ValueError(
            f"{repository}: its weights are not here and cannot be fetched ({type(error).__name__}); "
            f"run `hf download {which}` on a machine with access, and give the folder"
        ) from None
    for file, found in files.items():
        yield f"{repository}/{file}", {name: Stored(one.dtype, tuple(one.shape)) for name, one in found.tensors.items()}
