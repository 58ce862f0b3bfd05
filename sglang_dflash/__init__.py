"""DFlash speculative decoding for SGLang."""
