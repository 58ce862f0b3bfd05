"""The draft: its checkpoint, and the model that SGLang runs."""
