"""Choice of the verify width, the number of tokens of a block to verify. Independent of SGLang and torch."""
