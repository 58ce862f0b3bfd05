"""Requests with keys and values on pages in any order, and attention over them by PyTorch's own function."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

A, G, E, F = 4, 2, 16, 16  # query heads, KV heads, their widths
SCALE = 0.3


@dataclass
class Scene:
    """Request b has `n_keys[b]` keys, and the last `n_queries[b]` of them are its queries."""

    n_queries: list[int]
    n_keys: list[int]
    page_size: int = 1
    value_width: int = F
    seed: int = 0
    pages: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        n_pages = [-(-n // self.page_size) for n in self.n_keys]
        order = torch.randperm(sum(n_pages) + 3).tolist()  # three hold no request's keys
        self.pages = [[order.pop() for _ in range(n)] for n in n_pages]
        self.k_cache = torch.randn(sum(n_pages) + 3, self.page_size, G, E)
        self.v_cache = torch.randn(sum(n_pages) + 3, self.page_size, G, self.value_width)
        self.q = torch.randn(sum(self.n_queries), A, E)

    @property
    def table(self) -> torch.Tensor:
        """A page table, wider than it must be; what is not a request's is no page."""
        width = max(map(len, self.pages)) + 2
        rows = [row + [10**6] * (width - len(row)) for row in self.pages]
        return torch.tensor(rows, dtype=torch.int32)

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor(self.n_keys, dtype=torch.int32)

    @property
    def first_query(self) -> torch.Tensor:
        return starts(self.n_queries)

    @property
    def first_key(self) -> torch.Tensor:
        return starts(self.n_keys)

    @property
    def first_page(self) -> torch.Tensor:
        return starts([len(row) for row in self.pages])

    @property
    def page_numbers(self) -> torch.Tensor:
        return torch.tensor([page for row in self.pages for page in row], dtype=torch.int32)

    @property
    def last_page_len(self) -> torch.Tensor:
        return torch.tensor([(n - 1) % self.page_size + 1 for n in self.n_keys], dtype=torch.int32)

    def keys(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, G, E] and [L, G, F], one key at a time."""
        where = [(self.pages[b][i // self.page_size], i % self.page_size) for i in range(self.n_keys[b])]
        k, v = (torch.stack([cache[page, i] for page, i in where]) for cache in (self.k_cache, self.v_cache))
        return k, v

    def expected(
        self,
        *,
        causal: bool,
        left: int = -1,
        right: int = -1,
        sinks: torch.Tensor | None = None,
        scale: float = SCALE,
        blocks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, A, F]. `blocks` [N, N]: what of its last N keys each of N queries sees."""
        outs = []
        for b, queries in enumerate(self.q.split(self.n_queries)):
            k, v = self.keys(b)
            allowed = torch.tensor(
                [
                    [sees(i + len(k) - len(queries), j, causal, left, right) for j in range(len(k))]
                    for i in range(len(queries))
                ],
                dtype=torch.bool,
            ).view(len(queries), len(k))
            if blocks is not None:
                allowed[:, -len(blocks) :] &= blocks
            outs.append(attention(queries, k, v, allowed, scale, sinks))
        return torch.cat(outs)


def sees(query: int, key: int, causal: bool, left: int, right: int) -> bool:
    return (
        (not causal or key <= query)
        and (left < 0 or query - key <= left)
        and (right < 0 or key - query <= right)
    )  # fmt: skip


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([sum(lengths[:b]) for b in range(len(lengths) + 1)], dtype=torch.int32)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """PyTorch's own, in float64; a sink is one more key that scores as much as it says and has no value."""
    q, k, v = (x.double().movedim(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    bias = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf).expand(len(q), -1, -1)
    if sinks is not None:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        bias = torch.cat([bias, sinks.double()[:, None, None].expand(-1, bias.shape[1], 1)], dim=-1)
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias, scale=scale)
    return out[0].movedim(0, 1).float()
