"""DFlash speculative decoding, served by a plugin for stock SGLang.

A large language model, the target, writes one token per forward. DFlash (arXiv 2602.06036) lets it write several:
1. A small draft model guesses a whole block in one forward. Its input is the last committed token (the anchor) and
   N - 1 mask tokens; it fills all masks at once, as a diffusion model does in a single step.
2. What makes the guesses good is that the draft reads the target's mind, not the text: hidden states of a few target
   layers (the features) are projected into K and V for every draft layer, and serve as its context.
3. The target scores the block in one forward, which costs little more than scoring one token.
4. Drafts are kept as long as they are the tokens the target itself says; then comes one token of the target's own.
   So the output is exactly the target's, and a step commits 1 to N tokens for the price of little more than one.
5. The features of the kept tokens join the draft's context, and the next block starts.

Dimensions. In our own code a tensor's suffix is its shape, as in `tokens_BN`:

    B  requests in the batch            H  hidden size
    N  tokens per block                 C  features: captured layers x H
    D  drafts per block, N - 1          T  packed rows: tokens of several prompts or blocks
    V  vocabulary, or a rank's shard    L  draft layers     G  KV heads     E  head width

Words. One per thing, here and in every module; SGLang's own names stay SGLang's at the boundary:

    anchor        the last committed token; slot 0 of the block
    draft         a guessed token, slots 1..N-1; also the model that guesses
    target token  what the target says after a slot
    accepted      the drafts kept; `n_accepted` is 0..N-1
    bonus         the target's own token after them, the next anchor
    committed     accepted + bonus; a step emits these (drafts, then the bonus)
    kept rows     the anchor and the accepted drafts: as many as committed, shifted by one
    prefix_len    committed length before the step; `next_prefix_len` after it
    features      captured hidden states of the target
    context KV    draft K and V made from features
    slot          an index in the block, 0..N-1; a KV slot is a row of a cache
    width         how many tokens of a block are verified
"""

__version__ = "0.1.0"
