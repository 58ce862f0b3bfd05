"""What we know of SGLang: the names we lean on, its arguments, its scheduler's requests."""
