"""How many requests a card holds, before a launch; no GPU, no engine."""
