"""SGLang's default for `--mem-fraction-static`."""

from typing import NamedTuple


class Tier(NamedTuple):
    """SGLang's settings for cards with less memory than `below_gib`. They determine the memory that is left free."""

    below_gib: float
    chunk: int  # tokens of a prefill chunk
    max_batch: int  # requests in the largest decode graph
    max_batch_tp4: int  # the same with 4 or more ranks
    n_prefill_graphs: int


TIERS = (
    Tier(20, 2048, 8, 8, 42),
    Tier(35, 4096, 48, 160, 50),
    Tier(60, 4096, 32, 160, 50),
    Tier(160, 8192, 256, 512, 58),
    Tier(float("inf"), 16384, 512, 512, 74),
)


def default_mem_fraction(
    card_gib: float, *, tp_size: int, image_width: int, max_requests: int | None = None, chunk: int | None = None
) -> float:
    """Return SGLang 0.5.23's default --mem-fraction-static on CUDA (`handle_gpu_memory_settings`).

    Args:
        card_gib: memory of the card.
        tp_size: number of ranks.
        image_width: hidden size of the image encoder; 0 if there is none.
        max_requests: `--max-running-requests` if it is given.
        chunk: `--chunked-prefill-size` if it is given.
    """
    tier = next(tier for tier in TIERS if card_gib < tier.below_gib)
    max_batch = tier.max_batch_tp4 if tp_size >= 4 else tier.max_batch
    max_batch = min(max_batch, max_requests or max_batch)
    reserved = 512 + (chunk or tier.chunk) * 1.5 + tp_size / 8 * 1024 + max_batch * 2 + tier.n_prefill_graphs * 8
    if card_gib > 60:
        reserved = max(reserved, 10 * 1024)
    fraction = round(1 - reserved / (card_gib * 1024), 3)
    if not image_width:
        return fraction
    # SGLang estimates Qwen's image encoders, whose configs lack num_hidden_layers, from their width alone.
    return fraction * 0.95 * max(0.8, min(1.05, 1 - 0.1 * (image_width**2 / 1024**2 - 1)))
