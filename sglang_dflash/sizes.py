"""How many bytes the caches of a server take: arithmetic alone, without torch, SGLang or a GPU."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def ring_slots(window: int, block_size: int, page_size: int) -> int:
    """KV slots a request's ring has when its draft looks back `window` tokens.

    Besides the window the ring holds the block that is being drafted, and the start of the page in which the window
    begins.
    """
    return round_up(window + page_size - 1 + block_size, page_size)
