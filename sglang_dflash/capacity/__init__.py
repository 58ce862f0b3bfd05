"""Number of requests that a card holds, computed before a launch, without a GPU or SGLang."""
