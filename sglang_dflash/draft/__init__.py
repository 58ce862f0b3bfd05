"""The draft: what its checkpoint says, and the model SGLang runs."""
