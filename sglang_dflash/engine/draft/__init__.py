"""Draft model: reader of its checkpoint, and the model that SGLang runs."""
