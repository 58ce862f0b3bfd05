"""The two ways a launch is stopped. Each message is one sentence: what, what was found, what to do.

Wrong input (a bad checkpoint, a contradictory flag) is a plain ValueError.
"""

# The way out that a refusal names when SGLang's own worker might serve what ours does not.
STOCK = "set SGLANG_DFLASH_WORKER=stock to serve it with SGLang's own worker"


class NotSupported(ValueError):
    """The input is valid, but this version of the plugin cannot serve it exactly."""


class HostMismatch(RuntimeError):
    """The installed SGLang lacks a name or a parameter that `host/sglang-0.5.23.txt` lists."""
