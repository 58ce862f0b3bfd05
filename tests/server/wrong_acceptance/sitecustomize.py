"""Break acceptance of drafts in every process that has this folder on PYTHONPATH, to test that tests notice it.

The variable `WRONG_ACCEPTANCE` names one of `RULES`. Each is a plausible mistake that leaves greedy answers unchanged.
"""

import dataclasses
import os

from after_loading import edit_after_loading

MODULE = "sglang_dflash.engine.stages.build"
LINE = "acceptance spoilt: "


def draw_twice(tokens_BN, target_BN, again_BN, probs_BNV):
    """Replace a rejected draft by a draw from the target's whole distribution instead of the residual distribution."""
    return target_BN.where(target_BN == tokens_BN.roll(-1, dims=1), again_BN)


def argmax_inside(tokens_BN, target_BN, again_BN, probs_BNV):
    """Accept drafts as long as they equal the target's argmax; draw only the token after them."""
    argmax_BN = probs_BNV.argmax(dim=-1)
    agreed_BN = (argmax_BN == tokens_BN.roll(-1, dims=1)).long().cumprod(dim=1).bool()
    agreed_BN[:, -1] = False
    return argmax_BN.where(agreed_BN, target_BN)


def above_threshold(tokens_BN, target_BN, again_BN, probs_BNV):
    """Accept every draft to which the target gives a probability of at least 0.3, without a draw."""
    draft_BN = tokens_BN.roll(-1, dims=1)
    kept_BN = probs_BNV.gather(2, draft_BN[..., None]).squeeze(2) >= 0.3
    kept_BN[:, -1] = False
    return draft_BN.where(kept_BN, target_BN)


RULES = {rule.__name__: rule for rule in (draw_twice, argmax_inside, above_threshold)}


def spoil(build) -> None:
    rule = RULES[os.environ["WRONG_ACCEPTANCE"]]
    honest_sample, honest_accept = build.Choice._sample, build.ACCEPT.on_cpu
    sampled = []

    def sample(self, logits_TV, info, positions_BN, *, keep_logits=False):
        temperature_T1 = info.temperatures.repeat_interleave(positions_BN.shape[1], dim=0)
        again_T, _ = honest_sample(self, logits_TV.clone(), info, positions_BN)
        sampled[:] = again_T.long().view(positions_BN.shape), (logits_TV / temperature_T1).softmax(dim=-1)
        return honest_sample(self, logits_TV, info, positions_BN, keep_logits=keep_logits)

    def accept(tokens_BN, target_BN, prefix_len_B, track_interval=0):
        if sampled:  # filled by `sample` in this step; empty in a greedy step
            again_BN, probs_TV = sampled
            target_BN = rule(tokens_BN, target_BN, again_BN, probs_TV.view(*tokens_BN.shape, -1))
            sampled.clear()
        return honest_accept(tokens_BN, target_BN, prefix_len_B, track_interval)

    build.Choice._sample = sample
    build.ACCEPT = dataclasses.replace(build.ACCEPT, on_cpu=accept)
    print(LINE + rule.__name__, flush=True)


edit_after_loading({MODULE: spoil})
