"""Width: the number of tokens of a drafted block that are verified. Independent of SGLang and torch."""
