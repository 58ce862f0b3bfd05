"""Models that a public package carries, written as Hugging Face checkpoints: for demos, tests and measurements."""
