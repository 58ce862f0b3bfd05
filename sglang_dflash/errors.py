"""The two kinds of refusal. Each message is one sentence: what, what was found, what to do.

Wrong input (a bad checkpoint, a contradictory flag) is a plain ValueError.
"""

# Remedy named by refusals when SGLang's own worker may serve what this plugin does not.
STOCK = "set SGLANG_DFLASH_WORKER=stock to serve it with SGLang's own worker"


class NotSupported(ValueError):
    """Error for input that is valid, but that this version of the plugin cannot serve exactly."""


class HostMismatch(RuntimeError):
    """Error for an installed SGLang that lacks a name or a parameter listed in `host/sglang-0.5.23.txt`."""
