"""Interface to SGLang: the names that this plugin uses, SGLang's arguments, and its scheduler's requests."""
