"""Which attention backend may run the draft: pure rules over its layers and the device.

A DFlash draft needs a mask that ordinary decoding does not: in a full layer every slot of the block sees the whole
block. A backend that cannot express a layer's mask gives other drafts, and acceptance falls without an error; so the
pairing is refused here. Whether a kernel is installed is SGLang's to say.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dflash.checkpoint import Layer
from sglang_dflash.errors import NotSupported

FLAG = "--speculative-draft-attention-backend"


@dataclass(frozen=True)
class Backend:
    """What one backend computes right for a block of the draft.

    Attributes:
        devices: where it runs.
        block: a slot sees the later slots of its block (non-causal), in a layer without a window.
        block_window: the same in a layer with a window.
        fp8_kv: it reads an fp8 draft KV cache.
        because: where in SGLang 0.5.23 this was read.
    """

    devices: tuple[str, ...]
    block: bool
    block_window: bool
    fp8_kv: bool
    because: str


# Causal layers, with or without a window, are ordinary and right on all of them. The order is that of preference.
BACKENDS = {
    "fa3": Backend(
        devices=("sm80", "sm90"),
        block=True,
        block_window=True,
        fp8_kv=True,
        because="flashattention_backend.forward_extend: causal follows attn_type per layer, window is (left, right)",
    ),
    "fa4": Backend(
        devices=("sm90", "sm100", "sm110"),
        block=True,
        block_window=True,
        fp8_kv=False,
        because="the same code; kv_cache_dtype.py: the kernel needs K and Q of one dtype",
    ),
    "trtllm_mha": Backend(
        devices=("sm90", "sm100", "sm120"),
        block=False,
        block_window=False,
        fp8_kv=True,
        because="its verify kernel is causal in the block; the expanded rows for non-causal layers give all slots "
        "the last slot's window (trtllm_mha_backend.forward_extend), and speculative_hook.py gates them off",
    ),
    "flashinfer": Backend(
        devices=("sm80", "sm90", "sm100", "sm120"),
        block=True,
        block_window=True,
        fp8_kv=True,
        because="flashinfer_backend.forward_extend: the paged wrapper gets causal and window_left per layer",
    ),
    "triton": Backend(
        devices=("sm80", "sm90", "sm100", "sm120"),
        block=True,
        block_window=True,
        fp8_kv=True,
        because="triton_backend.forward_extend: causal per layer; extend_attention.py: its window bounds the past only",
    ),
    "torch_native": Backend(
        devices=("cpu",),
        block=True,
        block_window=True,
        fp8_kv=False,
        because="sglang_dflash.cpu.attention: our own masks, tested against their definition",
    ),
}


@dataclass(frozen=True)
class Choice:
    """The backend that will run the draft, and why when nobody named it."""

    name: str
    reason: str


def resolve(*, asked: str | None, target: str | None, layers: Sequence[Layer], device: str, fp8_kv: bool) -> Choice:
    """The draft's backend: the one asked for, else the target's, else the first that fits.

    Args:
        asked: the flag's value.
        target: the target's prefill backend.
        device: "cpu" or a compute capability such as "sm90".
        fp8_kv: the draft's KV cache is fp8.
    Raises:
        NotSupported: the backend asked for, or every backend, would compute a wrong mask here.
    """
    if asked is not None:
        reason = why_not(asked, layers=layers, device=device, fp8_kv=fp8_kv)
        if reason:
            fits = [name for name in BACKENDS if not why_not(name, layers=layers, device=device, fp8_kv=fp8_kv)]
            raise NotSupported(f"{FLAG} {asked}: {reason}; use {' or '.join(fits) or 'another draft'}")
        return Choice(asked, f"named by {FLAG}")
    if target is not None and not why_not(target, layers=layers, device=device, fp8_kv=fp8_kv):
        return Choice(target, "the target's")
    for name in BACKENDS:
        if not why_not(name, layers=layers, device=device, fp8_kv=fp8_kv):
            return Choice(name, f"the target's {target} does not fit this draft")
    raise NotSupported(
        f"no draft attention backend fits this draft on {device}; its layers are {sorted(map(str, set(layers)))}"
    )


def why_not(name: str, *, layers: Sequence[Layer], device: str, fp8_kv: bool) -> str:
    """Why `name` cannot run the draft, as half a sentence; empty when it can."""
    backend = BACKENDS.get(name)
    if backend is None:
        return f"it is not a draft backend of this plugin ({', '.join(BACKENDS)})"
    if device not in backend.devices:
        return f"it does not run on {device} ({', '.join(backend.devices)} only)"
    if not backend.block and any(not layer.causal and layer.window is None for layer in layers):
        return "it masks later slots of a block, which this draft's full-attention layers must see"
    if not backend.block_window and any(not layer.causal and layer.window is not None for layer in layers):
        return "it cannot combine a sliding window with a non-causal block, which this draft's sliding layers need"
    if fp8_kv and not backend.fp8_kv:
        return "it cannot read an fp8 draft KV cache (--speculative-draft-kv-cache-dtype)"
    return ""
