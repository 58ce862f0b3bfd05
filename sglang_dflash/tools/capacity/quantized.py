"""Facts about quantized checkpoints that SGLang reads from ModelOpt's fields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.engine.draft.files import read_object

HF_QUANT = "hf_quant_config.json"  # ModelOpt's file beside config.json


def has_fp8_kv(config: Mapping[str, Any], folder: Path | None) -> bool:
    """Return whether SGLang stores K and V in fp8 with --kv-cache-dtype auto, because a ModelOpt checkpoint asks so."""
    found = config.get("quantization_config") or {}
    if folder and (folder / HF_QUANT).is_file():
        found = {**found, **read_object(folder / HF_QUANT, "fetch the target again").get("quantization", {})}
    scheme = found.get("kv_cache_scheme") if "modelopt" in str(found.get("quant_method", "modelopt")) else None
    in_8_bits = isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return in_8_bits or "FP8" in (found.get("kv_cache_quant_algo"), scheme)
