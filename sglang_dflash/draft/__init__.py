"""Draft: its checkpoint, and the model that SGLang runs."""
