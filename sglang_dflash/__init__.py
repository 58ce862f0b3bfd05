"""DFlash speculative decoding, served by a plugin for unmodified SGLang.

A large language model, the target, writes one token per forward. DFlash (arXiv 2602.06036) lets it write several:
1. A small draft model guesses a whole block in one forward. Its input is the last committed token (the anchor) and
   N - 1 mask tokens. The draft model replaces all masks in this forward, like a diffusion model with a single step.
2. The draft model does not read the text itself. Hidden states of a few target layers (the features) are projected into
   K and V for every draft layer. These K and V are the draft's context, and make its guesses good.
3. The target scores the block in one forward, which costs little more than scoring one token.
4. Drafts before the first one that differs from the target's own token are kept. Then the target's own token is added.
   So the output is exactly the target's, and a step commits 1 to N tokens for little more than the price of one.
5. The features of the kept tokens are added to the draft's context, and the next block starts.

Dimensions. A tensor's suffix is its shape, as in `tokens_BN`. A module that uses other letters defines them.

    B  requests in the batch            H  hidden size
    N  tokens per block, or the width   C  features: captured layers x H
    D  drafts per block, N - 1          T  packed rows: tokens of several prompts or blocks
    V  vocabulary, or a rank's shard    L  draft layers     G  KV heads     E  head width

Terms of the decode step (fields and arguments that SGLang reads keep SGLang's names):

    anchor        the last committed token; slot 0 of the block
    draft         a guessed token, slots 1..N-1; also the model that guesses
    target token  the token that the target itself chooses after a slot
    accepted      the drafts kept; `n_accepted`, the number of them, is 0..N-1
    bonus         the target's own token after the accepted drafts, and the next anchor
    committed     the tokens that a step emits: the accepted drafts, then the bonus
    kept rows     token rows of the anchor and the accepted drafts: as many as committed tokens, but shifted by one
    prefix_len    number of tokens before the anchor, prompt included; `next_prefix_len`: before the next anchor
    features      captured hidden states of the target
    context KV    draft K and V made from features
    slot          an index in the block, 0..N-1; a KV slot is a row of a KV cache, a state slot a recurrent state
    width         number of verified tokens per block; n-gram copies may replace the last drafts and fill slots beyond N
    acceptance    the acceptance length: mean number of committed tokens per step of a request, bonus included
    copy          the tokens that followed an earlier occurrence of the same n-gram in the request (prompt lookup)
    record        one token's change of a recurrent state; verify writes records, commit adds those of kept rows
    ring buffer   the draft's KV slots of a request's last tokens, if the draft has a sliding window
    selector      part of a DFlash 2 draft that chooses one candidate per slot, from left to right
"""

__version__ = "0.1.0"
