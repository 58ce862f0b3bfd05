"""Models from public packages, written as Hugging Face checkpoints, and prompts for demos, tests and measurements."""
