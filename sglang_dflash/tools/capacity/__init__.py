"""Computation of the number of requests that a card holds, before a launch, without a GPU or SGLang."""
