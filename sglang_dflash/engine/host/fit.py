"""Choices and checks that depend on draft and launch: block size, window, heads, load format, notes for the log."""

from collections.abc import Sequence

from sglang_dflash.engine.draft.pair import unused
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.engine.host.arguments import IGNORED, Arguments, TargetFacts, flag
from sglang_dflash.engine.memory.sizes import MAX_REQUESTS, kept_window
from sglang_dflash.engine.memory.texts import DETERMINISTIC
from sglang_dflash.errors import STOCK, NotSupported

# Load formats that read a draft's files. With "auto" SGLang would refuse the options of the last two in
# --model-loader-extra-config.
PLAIN = ("safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "presharded")
LONGEST = 32  # longest block in tokens that a launch may set beyond the trained size
DUMMY = "dummy"  # SGLang's name for random weights


def block_size(arguments: Arguments, draft: Checkpoint) -> int:
    """Return the block size N, anchor and drafts: the launch's if it sets one, else the trained size.

    A block may be longer than in training, up to `LONGEST` tokens. `notes` mentions it.

    Raises:
        ValueError: the launch sets a block that is too long or shorter than 2 tokens.
    """
    trained = draft.n_drafts + 1
    # LiLiCorr has an embedding for each trained slot, so its blocks cannot be longer.
    most = max(trained, LONGEST) if draft.lilicorr is None else trained
    asked = trained if arguments.block_size is None else arguments.block_size
    if draft.sliding_window is not None:  # attention backends assume that no window cuts a block
        most = min(most, draft.sliding_window)
    if not 2 <= asked <= most:
        raise ValueError(
            f"block size {asked} is not within 2..{most}: {draft.path} was trained for blocks of {trained} tokens "
            "(config.json: block_size); set --speculative-num-draft-tokens or --speculative-dflash-block-size to "
            f"{trained} or less, or drop both"
        )
    return asked


def window(arguments: Arguments, draft: Checkpoint, block_size: int) -> int | None:
    """Return the number of context tokens that the draft keeps of a request; None: all.

    Raises:
        ValueError: the launch sets a window shorter than a block.
    """
    least = block_size if arguments.disaggregation == "null" else max(block_size, draft.block_size)
    if arguments.draft_window is not None and arguments.draft_window < least:
        raise ValueError(
            f"--speculative-draft-window-size {arguments.draft_window} is smaller than the block of {least}; "
            f"give at least {least}"
        )
    # With disaggregation SGLang sends the K/V in the target's KV slots, so the draft keeps all context tokens in these.
    return kept_window(arguments.draft_window, draft.window) if arguments.disaggregation == "null" else None


def layers(arguments: Arguments, draft: Checkpoint) -> Checkpoint:
    """Return the draft with the layers that are served.

    With disaggregation the draft keeps all context tokens, and a draft window becomes the window of its layers. So the
    window limits what a block reads, but saves no memory. The window of a layer ends at each slot. Without
    disaggregation, a draft window ends before the anchor.

    Raises:
        NotSupported: see `Checkpoint.narrowed`.
    """
    return draft if arguments.disaggregation == "null" else draft.narrowed(arguments.draft_window)


def check_sessions(arguments: Arguments, draft_window: int | None) -> None:
    """Check that the draft's window can start wherever a session's turn starts, or raise NotSupported.

    A turn may start inside a page, but the window starts at a page boundary.
    """
    if not arguments.streaming_session:
        return
    # page_size None: not resolved yet. The scheduler process runs this check again, with the resolved page size.
    if draft_window is not None and arguments.page_size not in (None, 1):
        raise NotSupported(
            f"--enable-streaming-session is not supported with a draft window of {draft_window} tokens and a page size "
            f"of {arguments.page_size} (a turn may start inside a page, the window cannot); set --page-size 1 with a "
            "backend that keeps it, such as fa3 or triton, or drop --enable-streaming-session"
        )


def check_rings(arguments: Arguments, draft_window: int | None) -> None:
    """Refuse ring buffers if SGLang sizes pools after graph capture: rings would get as many KV slots as the target."""
    if draft_window is not None and arguments.sized_after_capture:
        raise NotSupported(
            f"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 is not supported with a draft window of {draft_window} tokens "
            "(the ring buffers would get as many KV slots as the target); set SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=0"
        )


def check_disaggregation(arguments: Arguments, draft: Checkpoint) -> None:
    """Raise NotSupported if a draft needs more of a prompt than K/V, but disaggregation sends only K/V."""
    if draft.lilicorr is not None and arguments.disaggregation != "null":
        raise NotSupported(
            f"--disaggregation-mode {arguments.disaggregation} is not supported with a LiLiCorr draft ({draft.path}: "
            "it also reads the context of the last prompt token, which is not sent with the K/V); drop "
            "--disaggregation-mode, or give another draft"
        )


def check_flash_rl(arguments: Arguments, draft: Checkpoint) -> None:
    """Refuse `--load-format flash_rl` for a draft with a reduced vocabulary, or raise NotSupported.

    Such a draft has a copy of the head's rows. SGLang's update of the target with this format does not call what
    refreshes the copy.
    """
    if arguments.load_format == "flash_rl" and draft.draft_vocab_size:
        raise NotSupported(
            "--load-format flash_rl is not supported for a draft with a reduced vocabulary (its copy of the head's "
            f"rows would not follow updates of the target); {STOCK}"
        )


def check_heads(arguments: Arguments, draft: Checkpoint) -> None:
    """Check that the draft's heads can be split over the ranks that run the same requests, or raise ValueError."""
    n_ranks, flags, cure = arguments.tp_size, f"--tp-size {arguments.tp_size}", "set --tp-size to"
    if arguments.attention_dp:
        n_ranks //= arguments.attention_dp_size
        flags += f", {arguments.attention_dp_size} groups of data-parallel attention"
        cure = "set --tp-size or --attn-dp-size so that the ranks of a group are"
    n_heads, kv = draft.num_attention_heads, draft.num_key_value_heads
    fits = [n for n in range(1, n_heads + 1) if n_heads % n == 0 and (kv % n == 0 or n % kv == 0)]
    if n_ranks not in fits:
        raise ValueError(
            f"{draft.path}: {n_heads} heads and {kv} KV heads cannot be split over {n_ranks} ranks ({flags}); "
            f"{cure} {' or '.join(map(str, fits))}"
        )


def load_format(arguments: Arguments) -> str | None:
    """Return the load format of the draft's weights; None: the target's, which can read a draft's files.

    Formats such as `gguf` and `flash_rl` are the target's only, and the draft is loaded from its own files. The same
    holds for `dummy`, because a trainer sends the target's weights later, but not the draft's.

    Raises:
        NotSupported: the launch sets dummy weights for the draft.
    """
    if arguments.draft_load_format == DUMMY:
        raise NotSupported(
            f"--speculative-draft-load-format {DUMMY} is not supported with DFLASH (with random weights hardly any "
            "draft token would be accepted); drop the flag: the draft is loaded from its files even with "
            "--load-format dummy"
        )
    by_default = None if arguments.load_format in PLAIN else "auto"
    return arguments.draft_load_format or by_default


def ignored(arguments: Arguments) -> tuple[str, ...]:
    """Return a sentence for each flag of another algorithm."""
    return tuple(f"{flag(name)} is ignored: {IGNORED[name]}" for name in arguments.ignored)


def check_deepep(arguments: Arguments, widths: Sequence[int]) -> None:
    """Check that DeepEP's buffers hold the token rows of the largest verify.

    With too small buffers SGLang would fail while it captures graphs.

    Raises:
        NotSupported: the buffers are too small.
    """
    n_groups, limit = arguments.attention_dp_size, arguments.deepep_rows
    if limit is None or not widths:
        return
    n_requests = (arguments.max_requests or MAX_REQUESTS) // n_groups
    n_ranks = arguments.tp_size // n_groups
    n_rows = -(-n_requests * widths[-1] // n_ranks)  # rounded up
    if n_rows > limit:
        raise NotSupported(
            f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK={limit} is too small: verifying {widths[-1]} tokens of "
            f"{n_requests} requests sends {n_rows} rows per rank through DeepEP's buffers; set it to {n_rows} (at most "
            f"1024), or give --max-running-requests {limit * n_ranks // widths[-1] * n_groups} or --deepep-mode normal"
        )


def notes(arguments: Arguments, target: TargetFacts, draft: Checkpoint) -> tuple[str, ...]:
    """Return sentences for the log: differences between draft and target, and ignored tensors and flags."""
    found = []
    if draft.max_position_embeddings < target.context_length:
        found.append(
            f"{draft.path} was trained for {draft.max_position_embeddings} positions and serves "
            f"{target.context_length} (beyond them answers stay exact, but fewer drafts may be accepted)"
        )
    if (arguments.block_size or 0) > draft.n_drafts + 1:
        found.append(
            f"{draft.path} was trained for blocks of {draft.n_drafts + 1} tokens and drafts blocks of "
            f"{arguments.block_size} (answers stay exact, but few of the further drafts may be accepted)"
        )
    if draft.dtype != target.dtype:
        found.append(f"{draft.path} has dtype {draft.dtype} and is loaded in {target.dtype}, the target's dtype")
    if draft.packing:
        found.append(f"{draft.path} is stored as {draft.packing.words} and is unpacked while it loads")
    if draft.vocab_size not in (None, target.vocab_size):
        found.append(
            f"{draft.path} has vocab_size {draft.vocab_size} and uses the target's embedding and head of "
            f"{target.vocab_size} rows"
        )
    if draft.attention_value_scale != 1.0 and not draft.has_mask_row:
        found.append(
            f"{draft.path} has no mask_embedding.pt, which MiMo's drafts have: with the target's untrained row of the "
            "mask token hardly any draft may be accepted"
        )
    if draft.borrowed:
        found.append(f"{draft.path}: {unused(draft.borrowed)}")
    if arguments.deterministic:
        found.append(
            f"{DETERMINISTIC}: by default all steps verify whole blocks, without n-gram copies, because widths and "
            "copies follow measured times and earlier requests"
        )
    if arguments.load_format == DUMMY:
        found.append(f"--load-format {DUMMY} applies only to the target: the draft is loaded from {draft.path}")
    return tuple(found)
