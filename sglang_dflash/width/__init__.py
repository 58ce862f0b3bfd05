"""How many tokens of a drafted block are verified. Knows no engine and no tensor."""
