"""The algebra of the gated delta rule for a block of tokens: no token loop, no knowledge of SGLang.

Per value head, with state S [V, K], log decay g <= 0 and beta in (0, 1), one token does

    S <- exp(g) S;   delta = beta (v - S k);   S <- S + delta k^T;   o = S q

Over C tokens the deltas solve one triangular system. With G_t = g_1 + ... + g_t and D_ts = exp(G_t - G_s), s <= t:

    (I + A) Delta = beta (V - exp(G) K S_0^T),   A_ts = beta_t D_ts (k_t . k_s) for s < t
    o_t = exp(G_t) S_0 q_t + sum_{s<=t} D_ts (q_t . k_s) delta_s
    S_C = exp(G_C) S_0     + sum_s D_Cs delta_s k_s^T

(Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464.) Queries and keys meet the same keys and the same state, so
they are kept in one tensor and multiplied once.

Dimension key: B blocks, C tokens of a block, G key heads, R value heads per key head, K key width, V value width;
J = 2 is queries, then keys. A 1 is a broadcast dimension. All fp32.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

L2_EPS = 1e-6


class Block(NamedTuple):
    qk_BGJCK: torch.Tensor  # queries are scaled
    v_BGRCV: torch.Tensor
    beta_BGRC1: torch.Tensor
    total_BGRC: torch.Tensor  # G_t
    decay_BGRC: torch.Tensor  # exp(G_t): what is left of the state from before the block
    decay_BGRCC: torch.Tensor  # D_ts, zero above the diagonal
    scores_BGRJCC: torch.Tensor  # D_ts (q_t . k_s) and D_ts (k_t . k_s)

    @classmethod
    def of(
        cls, qk_BGJCK: torch.Tensor, v_BCHV: torch.Tensor, *, g_BCH: torch.Tensor, beta_BCH: torch.Tensor
    ) -> "Block":
        """Value heads H = G R are split by the key head they share."""
        B, G, J, C, K = qk_BGJCK.shape
        R = v_BCHV.shape[2] // G
        total_BGRC = g_BCH.transpose(1, 2).cumsum(dim=-1).view(B, G, R, C)
        # Masked before exp: above the diagonal the exponent is positive and may overflow.
        decay_BGRCC = (total_BGRC[..., None] - total_BGRC[..., None, :]).masked_fill_(_later(C), -torch.inf).exp_()
        alike_BGJCC = (qk_BGJCK.view(B, G, J * C, K) @ qk_BGJCK[:, :, 1].transpose(2, 3)).view(B, G, 1, J, C, C)
        return cls(
            qk_BGJCK=qk_BGJCK,
            v_BGRCV=v_BCHV.transpose(1, 2).unflatten(1, (G, R)),
            beta_BGRC1=beta_BCH.transpose(1, 2).unflatten(1, (G, R))[..., None],
            total_BGRC=total_BGRC,
            decay_BGRC=total_BGRC.exp(),
            decay_BGRCC=decay_BGRCC,
            scores_BGRJCC=alike_BGJCC * decay_BGRCC[:, :, :, None],
        )

    def read(self, state_BGRVK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What queries and keys find in the states from before the blocks, decayed; two [B, G, R, C, V]."""
        B, G, J, C, K = self.qk_BGJCK.shape
        R, V = state_BGRVK.shape[2:4]
        # The value heads that share a key head are more rows of one matrix: no key is repeated.
        found = self.qk_BGJCK.view(B, G, J * C, K) @ state_BGRVK.view(B, G, R * V, K).transpose(2, 3)
        found_BGRJCV = found.view(B, G, J, C, R, V).permute(0, 1, 4, 2, 3, 5) * self.decay_BGRC[:, :, :, None, :, None]
        found_by_q, found_by_k = found_BGRJCV.unbind(3)
        return found_by_q, found_by_k

    def solve(self, right_BGRCX: torch.Tensor) -> torch.Tensor:
        """X of (I + A) X = beta * right; the solver looks below the diagonal only, which is A."""
        coupling_BGRCC = self.scores_BGRJCC[:, :, :, 1] * self.beta_BGRC1
        return torch.linalg.solve_triangular(
            coupling_BGRCC, right_BGRCX * self.beta_BGRC1, upper=False, unitriangular=True
        )

    def outputs(self, found_by_q_BGRCV: torch.Tensor, delta_BGRCV: torch.Tensor) -> torch.Tensor:
        """[B, C, H, V]"""
        return (found_by_q_BGRCV + self.scores_BGRJCC[:, :, :, 0] @ delta_BGRCV).flatten(1, 2).transpose(1, 2)

    def states(self, state_BGRVK: torch.Tensor, delta_BGRCV: torch.Tensor, *, out_BCGRVK: torch.Tensor) -> None:
        """The states after every token: S_t = delta_t k_t^T + exp(g_t) S_{t-1}, written where they stay."""
        k_BCG1K = self.qk_BGJCK[:, :, 1].transpose(1, 2)[:, :, :, None]
        torch.mul(delta_BGRCV.movedim(3, 1)[..., None], k_BCG1K[..., None, :], out=out_BCGRVK)
        # exp(g_t) is the first decay from before the block, then D just below the diagonal.
        step_decay_BGRC = torch.cat([self.decay_BGRC[..., :1], self.decay_BGRCC.diagonal(-1, -2, -1)], dim=-1)
        steps = zip(out_BCGRVK.unbind(1), step_decay_BGRC[..., None, None].unbind(3), strict=True)
        for after_BGRVK, step_decay_BGR11 in steps:
            state_BGRVK = after_BGRVK.addcmul_(state_BGRVK, step_decay_BGR11)


@lru_cache
def _later(C: int) -> torch.Tensor:
    """True where the key comes after the query."""
    return torch.ones(C, C, dtype=torch.bool).triu_(1)


def log_decay(
    A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, *, beta: float = 1.0, threshold: float = 20.0
) -> torch.Tensor:
    """g = -exp(A_log) softplus(a + dt_bias), fp32, shaped like a [..., H]; beta and threshold are softplus's."""
    return F.softplus(a.float() + dt_bias.float(), beta, threshold) * -A_log.float().exp()


def l2_normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.linalg.vecdot(x, x).add_(L2_EPS).rsqrt_()[..., None]
