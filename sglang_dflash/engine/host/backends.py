"""Selection of the draft's attention backend, by masks, KV cache dtype, page size and device.

A DFlash draft needs a mask that ordinary decoding does not need: in a full layer every slot of the block attends to the
whole block. If a backend lacked this mask, drafts would change and acceptance would fall, without an error. So only the
backends in `BACKENDS`, which have the mask, are allowed. SGLang checks that a backend's kernels are installed.

One difference is allowed: flashinfer uses the first slot's window for all slots of a block. So slot i of a sliding
layer attends to i more tokens than its window (at most N - 1). This may change drafts, but not answers.
"""

from dataclasses import dataclass, replace

from sglang_dflash.errors import STOCK, NotSupported

FLAG = "--speculative-draft-attention-backend"
OWN_DTYPE = "--speculative-draft-kv-cache-dtype auto"  # keeps the draft's KV cache in the draft's dtype
# Values of `--speculative-draft-kv-cache-dtype` for a cache in the draft's dtype, or in bf16.
UNQUANTIZED = ("auto", "bf16", "bfloat16")
TRTLLM_PAGES = (16, 32, 64, 128)  # page sizes of trtllm_mha, in tokens


@dataclass(frozen=True)
class Backend:
    """Devices, caches and masks that an attention backend supports for a block of the draft.

    Attributes:
        devices: supported devices.
        fp8_kv: devices on which a draft KV cache of fp8_e4m3 can be written and read.
        own_kv: SGLang keeps the draft's cache in the draft's dtype for any value of the KV dtype flag.
        pages: supported page sizes in tokens; empty: any.
        one_pass: a non-causal layer reads the context once; False: once per slot.
        slides_both_ways: a sliding layer may be non-causal.
        sinks: heads may have attention sinks.
        waits_for_windows: with sliding layers the host plans each step with lengths that it copies from the GPU.
    """

    devices: tuple[str, ...]
    fp8_kv: tuple[str, ...]
    own_kv: bool = False
    pages: tuple[int, ...] = ()
    one_pass: bool = True
    slides_both_ways: bool = True
    sinks: bool = True
    waits_for_windows: bool = False

    def is_fast(self, needs: "Needs") -> bool:
        return (self.one_pass or not needs.whole_blocks) and not (self.waits_for_windows and needs.slides)


# Backends in order of preference. The comments name the file and function in SGLang 0.5.23 that compute the mask. Masks
# are exact, except flashinfer's in sliding layers (see the module docstring).
BACKENDS = {
    # flashattention_backend.forward_extend: each layer's attn_type sets causal. In a non-causal layer the window also
    # limits later tokens. The kernels for compute capability 8.x support only fp16 and bf16 caches.
    "fa3": Backend(devices=("sm80", "sm89", "sm90"), fp8_kv=("sm90",)),
    # The code of fa3, with other kernels for 12.x (flash_attention_v4_sm120.py). kv_cache_dtype.py: K and Q must have
    # one dtype, so the cache of a DFLASH draft has the draft's dtype.
    "fa4": Backend(devices=("sm90", "sm100", "sm110", "sm120"), fp8_kv=(), own_kv=True),
    # trtllm_mha_backend.forward_extend: a causal layer runs in the verify kernel. In a non-causal layer each slot is a
    # separate sequence over context and whole block (encoder_page_table), so all would get the last slot's window.
    "trtllm_mha": Backend(
        devices=("sm90", "sm100", "sm120"),
        fp8_kv=("sm90", "sm100", "sm120"),
        pages=TRTLLM_PAGES,
        one_pass=False,
        slides_both_ways=False,
    ),
    # flashinfer_backend.forward_extend: each layer sets causal. update_sliding_window: K and V of a request are cut to
    # one window. Within the cut a verify applies no window, and the draft's block runs as a verify.
    "flashinfer": Backend(
        devices=("sm80", "sm89", "sm90", "sm100", "sm120"),
        fp8_kv=("sm89", "sm90", "sm100", "sm120"),
        sinks=False,
        waits_for_windows=True,
    ),
    # triton_backend.forward_extend: each layer sets causal. extend_attention.py: the window limits earlier tokens. In a
    # non-causal layer the window also limits later tokens. This has no effect, as no window is shorter than N.
    "triton": Backend(devices=("sm80", "sm89", "sm90", "sm100", "sm120"), fp8_kv=("sm89", "sm90", "sm100", "sm120")),
    # sglang_dflash.platforms.cpu.attention: this package's code, tested against a definition of the masks.
    "torch_native": Backend(devices=("cpu",), fp8_kv=(), sinks=False),
}


@dataclass(frozen=True)
class Needs:
    """Requirements of a draft on its attention backend.

    Attributes:
        whole_blocks: some layers are non-causal. These are full layers, or sliding layers with is_causal=false.
        slides: some layers are sliding layers.
        slides_both_ways: some sliding layers are non-causal.
        sinks: heads have attention sinks.
        device: "cpu" or a GPU's generation such as "sm90", see `arguments.device_of`.
        kv_dtype: value of the flag for the draft's KV cache, such as "auto" or "fp8_e4m3".
        page_size: tokens of a KV page; None: not resolved yet.
    """

    whole_blocks: bool
    device: str
    kv_dtype: str = "auto"
    page_size: int | None = None
    slides: bool = False
    slides_both_ways: bool = False
    sinks: bool = False


def resolve(*, asked: str | None, target: str | None, needs: Needs) -> str:
    """Return the draft's backend: the requested one, else the target's, else the first suitable backend.

    The target's backend is not used if it would read the context of non-causal layers once per slot, or if the host
    would wait for the GPU to plan sliding layers.

    Args:
        asked: value of `--speculative-draft-attention-backend`; None: not given.
        target: the target's prefill backend; None: not resolved.
        needs: requirements of the draft.
    Raises:
        NotSupported: the requested backend cannot run the draft, or no backend can.
    """
    fits = [name for name in BACKENDS if not why_not(name, needs)]
    fast = [name for name in fits if BACKENDS[name].is_fast(needs)]
    if asked is not None:
        reason = why_not(asked, needs)
        if reason:
            raise NotSupported(f"{FLAG} {asked}: {reason}; {_cure(asked, needs)}")
        return asked
    if target in fast:
        return target
    if fits:
        return (fast or fits)[0]
    if any(needs.device in backend.devices for backend in BACKENDS.values()):
        raise NotSupported(
            f"no attention backend of this plugin can use a draft KV cache of {needs.kv_dtype} on {needs.device}; "
            f"set {OWN_DTYPE}"
        )
    raise NotSupported(f"no attention backend of this plugin runs on {needs.device}; {STOCK}")


def _cure(asked: str, needs: Needs) -> str:
    """Return the flags to set in place of backend `asked`, which cannot run the draft."""
    fits, by_own_dtype = (
        [name for name in BACKENDS if not why_not(name, one)] for one in (needs, replace(needs, kv_dtype="auto"))
    )
    ways = [f"use {' or '.join(fits)}"] if fits else []
    if asked in by_own_dtype:
        ways.append(f"set {OWN_DTYPE}")
    elif by_own_dtype and not fits:
        ways.append(f"use {' or '.join(by_own_dtype)} with {OWN_DTYPE}")
    return ", or ".join(ways) or f"no backend of this plugin runs on {needs.device}, so {STOCK}"


def why_not(name: str, needs: Needs) -> str:
    """Return the reason why backend `name` cannot run the draft, without a full stop; "" if it can."""
    backend = BACKENDS.get(name)
    if backend is None:
        return f"it is not a draft backend of this plugin ({', '.join(BACKENDS)})"
    if needs.device not in backend.devices:
        return f"it does not run on {needs.device} ({', '.join(backend.devices)} only)"
    reads = needs.kv_dtype == "fp8_e4m3" and needs.device in backend.fp8_kv  # the only fp8 dtype of `append_context`
    if not backend.own_kv and needs.kv_dtype not in UNQUANTIZED and not reads:
        return f"it cannot use a draft KV cache of {needs.kv_dtype} on {needs.device}"
    if needs.slides_both_ways and not backend.slides_both_ways:
        return "in non-causal sliding layers it would give every slot the window of the block's last slot"
    if needs.sinks and not backend.sinks:
        return "it has no attention sinks, which this draft has"
    if backend.pages and needs.page_size is not None and needs.page_size not in backend.pages:
        return f"it needs a --page-size of {' or '.join(map(str, backend.pages))}, not {needs.page_size}"
    return ""
