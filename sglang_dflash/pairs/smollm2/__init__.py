"""Model from a public package, written as a Hugging Face checkpoint, and prompts made from installed packages."""
