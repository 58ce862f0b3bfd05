"""The algebra of the gated delta rule for a block of tokens: no token loop, no knowledge of SGLang.

Per value head, with state S [V, K], log decay g <= 0 and beta in (0, 1), one token does

    S <- exp(g) S;   delta = beta (v - S k);   S <- S + delta k^T;   o = S q

Over C tokens the deltas solve one triangular system. With G_t = g_1 + ... + g_t and D_ts = exp(G_t - G_s), s <= t:

    (I + A) Delta = beta (V - exp(G) K S_0^T),   A_ts = beta_t D_ts (k_t . k_s) for s < t
    o_t = exp(G_t) S_0 q_t + sum_{s<=t} D_ts (q_t . k_s) delta_s
    S_C = exp(G_C) S_0     + sum_s D_Cs delta_s k_s^T

(Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464.)

Dimension key: B blocks, C tokens of a block, G key heads, R value heads per key head, K key width, V value width.
A 1 is a broadcast dimension. All fp32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

L2_EPS = 1e-6


class Block(NamedTuple):
    q_BG1CK: torch.Tensor  # scaled
    k_BG1CK: torch.Tensor
    v_BGRCV: torch.Tensor
    beta_BGRC1: torch.Tensor
    decay_BGRC1: torch.Tensor  # exp(G_t): what is left of the state from before the block
    decay_BGRCC: torch.Tensor  # D_ts, zero above the diagonal

    @classmethod
    def of(
        cls,
        q_BCGK: torch.Tensor,
        k_BCGK: torch.Tensor,
        v_BCHV: torch.Tensor,
        *,
        g_BCH: torch.Tensor,
        beta_BCH: torch.Tensor,
    ) -> "Block":
        """Value heads H = G R are split by the key head they share."""
        C = q_BCGK.shape[1]
        heads = (q_BCGK.shape[2], v_BCHV.shape[2] // q_BCGK.shape[2])
        total_BGRC = g_BCH.transpose(1, 2).cumsum(dim=-1).unflatten(1, heads)
        later_CC = torch.ones(C, C, dtype=torch.bool).triu_(1)
        # Masked before exp: above the diagonal the exponent is positive and may overflow.
        decay_BGRCC = (total_BGRC[..., :, None] - total_BGRC[..., None, :]).masked_fill_(later_CC, -torch.inf).exp_()
        return cls(
            q_BG1CK=q_BCGK.transpose(1, 2)[:, :, None],
            k_BG1CK=k_BCGK.transpose(1, 2)[:, :, None],
            v_BGRCV=v_BCHV.transpose(1, 2).unflatten(1, heads),
            beta_BGRC1=beta_BCH.transpose(1, 2).unflatten(1, heads)[..., None],
            decay_BGRC1=total_BGRC.exp()[..., None],
            decay_BGRCC=decay_BGRCC,
        )

    def solve(self, right_BGRCX: torch.Tensor) -> torch.Tensor:
        """X of (I + A) X = beta * right."""
        similarity_BG1CC = self.k_BG1CK @ self.k_BG1CK.transpose(-1, -2)
        coupling_BGRCC = similarity_BG1CC * self.decay_BGRCC * self.beta_BGRC1
        # The solver reads below the diagonal only, which is A.
        return torch.linalg.solve_triangular(
            coupling_BGRCC, right_BGRCX * self.beta_BGRC1, upper=False, unitriangular=True
        )

    def deltas(self, state_BGRVK: torch.Tensor) -> torch.Tensor:
        """[B, G, R, C, V], from the states before the blocks."""
        return self.solve(self.v_BGRCV - self.decay_BGRC1 * (self.k_BG1CK @ state_BGRVK.transpose(-1, -2)))

    def outputs(self, state_BGRVK: torch.Tensor, delta_BGRCV: torch.Tensor) -> torch.Tensor:
        """[B, C, H, V], from the states before the blocks."""
        within_BGRCC = self.q_BG1CK @ self.k_BG1CK.transpose(-1, -2) * self.decay_BGRCC
        from_state_BGRCV = self.decay_BGRC1 * (self.q_BG1CK @ state_BGRVK.transpose(-1, -2))
        return (from_state_BGRCV + within_BGRCC @ delta_BGRCV).flatten(1, 2).transpose(1, 2)

    def states(self, state_BGRVK: torch.Tensor, delta_BGRCV: torch.Tensor, *, out_BCGRVK: torch.Tensor) -> None:
        """The states after every token, from the states before the blocks: S_t = exp(g_t) S_{t-1} + delta_t k_t^T."""
        step_decay_BGRC = torch.cat([self.decay_BGRC1[..., :1, 0], self.decay_BGRCC.diagonal(-1, -2, -1)], dim=-1)
        k_BG1CK = self.k_BG1CK
        for t in range(delta_BGRCV.shape[3]):
            after = out_BCGRVK[:, t]
            torch.mul(state_BGRVK, step_decay_BGRC[..., t, None, None], out=after)
            after.addcmul_(delta_BGRCV[..., t, :, None], k_BG1CK[..., t, None, :])
            state_BGRVK = after


def log_decay(
    A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, *, beta: float = 1.0, threshold: float = 20.0
) -> torch.Tensor:
    """g = -exp(A_log) softplus(a + dt_bias), fp32, shaped like a [..., H]; beta and threshold are softplus's."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta, threshold)


def l2_normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)
