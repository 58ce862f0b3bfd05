"""Gated delta rule for a whole block of tokens as matrix products, independent of SGLang.

For each value head, with state S [V, K], log decay g <= 0 and beta in (0, 1), a token updates the state and has the
output o:

    S <- exp(g) S;   delta = beta (v - S k);   S <- S + delta k^T;   o = S q

Over C tokens the deltas solve one triangular system. With G_t = g_1 + ... + g_t and D_ts = exp(G_t - G_s), s <= t:

    (I + A) Delta = beta (V - exp(G) K S_0^T),   A_ts = beta_t D_ts (k_t . k_s) for s < t
    o_t = exp(G_t) S_0 q_t + sum_{s<=t} D_ts (q_t . k_s) delta_s
    S_C = exp(G_C) S_0     + sum_s D_Cs delta_s k_s^T

Source: Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464. Both queries and keys are multiplied by the keys and
by the state, so one tensor holds queries and keys.

Shapes: B blocks, C tokens per block, X = 2 C rows (C queries, then C keys), G key heads, H value heads (H a multiple of
G), Y = B H pairs of a block and a value head, K key width, V value width. A 1 is a broadcast dimension. All fp32.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

L2_EPS = 1e-6  # added to the squared norm of queries and keys


class DeltaBlock(NamedTuple):
    """Terms of the equations above that do not depend on the state."""

    qk_YXK: torch.Tensor  # scaled queries, then keys; those of a key head are repeated for each of its value heads
    v_YCV: torch.Tensor
    beta_YC1: torch.Tensor
    total_YC: torch.Tensor  # G_t
    decay_YC: torch.Tensor  # exp(G_t): the remaining fraction of the state before the block
    decay_YCC: torch.Tensor  # D_ts, zero above the diagonal
    q_scores_YCC: torch.Tensor  # D_ts (q_t . k_s)
    k_scores_YCC: torch.Tensor  # D_ts (k_t . k_s)

    @classmethod
    def of(
        cls,
        q_BCGK: torch.Tensor,
        k_BCGK: torch.Tensor,
        v_BCHV: torch.Tensor,
        *,
        g_BCH: torch.Tensor,
        beta_BCH: torch.Tensor,
        scale: float | None = None,
        normalise: bool = True,
    ) -> "DeltaBlock":
        """Build the terms from queries, keys, values, log decay and beta.

        Args:
            scale: factor of the queries; None: 1 / sqrt(K).
            normalise: divide queries and keys by their L2 norms first.
        """
        C, G, K = q_BCGK.shape[1:]
        H = v_BCHV.shape[2]
        qk_BXGK = torch.cat([q_BCGK, k_BCGK], dim=1).float()
        if normalise:
            qk_BXGK = l2_normalised(qk_BXGK)
        qk_BXGK[:, :C] *= K**-0.5 if scale is None else scale
        qk_YXK = qk_BXGK.transpose(1, 2).repeat_interleave(H // G, dim=1).flatten(0, 1)
        total_YC = by_head(g_BCH.cumsum(dim=1))
        # The mask is applied before exp, because above the diagonal the exponent is positive and exp may overflow.
        decay_YCC = (total_YC[:, :, None] - total_YC[:, None]).masked_fill_(_later(C), -torch.inf).exp_()
        alike_YXC = torch.bmm(qk_YXK, qk_YXK[:, C:].transpose(1, 2))
        q_scores_YCC, k_scores_YCC = (alike_YXC.unflatten(1, (2, C)) * decay_YCC[:, None]).unbind(1)
        return cls(
            qk_YXK=qk_YXK,
            v_YCV=by_head(v_BCHV.float()),
            beta_YC1=by_head(beta_BCH)[..., None],
            total_YC=total_YC,
            decay_YC=total_YC.exp(),
            decay_YCC=decay_YCC,
            q_scores_YCC=q_scores_YCC,
            k_scores_YCC=k_scores_YCC,
        )

    @property
    def k_YCK(self) -> torch.Tensor:
        return self.qk_YXK[:, self.qk_YXK.shape[1] // 2 :]

    def read(self, state_YVK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return exp(G_t) S_0 q_t and exp(G_t) S_0 k_t, each [Y, C, V]; `state_YVK` is S_0, before the blocks."""
        found_YXV = torch.bmm(self.qk_YXK, state_YVK.transpose(1, 2))
        found_by_q, found_by_k = (found_YXV.unflatten(1, (2, -1)) * self.decay_YC[:, None, :, None]).unbind(1)
        return found_by_q, found_by_k

    def solve(self, right_YCX: torch.Tensor) -> torch.Tensor:
        """Return the solution Z of (I + A) Z = beta * right; here X is any number of columns, and Z has the same shape.

        The solver reads only elements below the diagonal.
        """
        return torch.linalg.solve_triangular(
            self.k_scores_YCC * self.beta_YC1, right_YCX * self.beta_YC1, upper=False, unitriangular=True
        )

    def outputs(self, found_by_q_YCV: torch.Tensor, delta_YCV: torch.Tensor) -> torch.Tensor:
        """Return the outputs o of the blocks, [Y, C, V]."""
        return torch.baddbmm(found_by_q_YCV, self.q_scores_YCC, delta_YCV)

    def states(self, state_YVK: torch.Tensor, delta_YCV: torch.Tensor, *, out_BCHVK: torch.Tensor) -> None:
        """Write the state after every token to `out_BCHVK`: S_t = delta_t k_t^T + exp(g_t) S_{t-1}."""
        B = len(out_BCHVK)
        torch.mul(by_token(delta_YCV, B)[..., None], by_token(self.k_YCK, B)[..., None, :], out=out_BCHVK)
        # exp(g_t) is exp(G_1) for the first token, and the element of D just below the diagonal for later tokens.
        step_decay_YC = torch.cat([self.decay_YC[:, :1], self.decay_YCC.diagonal(-1, -2, -1)], dim=-1)
        steps = zip(out_BCHVK.unbind(1), by_token(step_decay_YC, B)[..., None, None].unbind(1), strict=True)
        state_BHVK = state_YVK.unflatten(0, (B, -1))
        for after_BHVK, step_decay_BH11 in steps:
            state_BHVK = after_BHVK.addcmul_(state_BHVK, step_decay_BH11)


def by_head(x: torch.Tensor) -> torch.Tensor:
    """Reshape [B, C, H, ...] to [Y, C, ...]."""
    return x.transpose(1, 2).flatten(0, 1)


def by_token(x: torch.Tensor, n_blocks: int) -> torch.Tensor:
    """View [Y, C, ...] as [B, C, H, ...]."""
    return x.unflatten(0, (n_blocks, -1)).transpose(1, 2)


@lru_cache
def _later(C: int) -> torch.Tensor:
    """Return a bool mask [C, C], True where the key comes after the query."""
    return torch.ones(C, C, dtype=torch.bool).triu_(1)


def log_decay(
    A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, *, beta: float = 1.0, threshold: float = 20.0
) -> torch.Tensor:
    """Return g = -exp(A_log) softplus(a + dt_bias; beta, threshold), fp32, shaped like `a` [..., H]."""
    return F.softplus(a.float() + dt_bias.float(), beta, threshold) * -A_log.float().exp()


def l2_normalised(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(|x|^2 + L2_EPS), with the norm |x| over the last dimension."""
    return x * torch.linalg.vecdot(x, x).add_(L2_EPS).rsqrt_()[..., None]
