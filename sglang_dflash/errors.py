"""Two kinds of refusal. Each message is one sentence: the input, the value found and the cure.

Wrong input (a bad checkpoint, a contradictory flag) raises a plain ValueError.
"""

# Cure named by refusals of launches that SGLang's own worker may serve.
STOCK = "set SGLANG_DFLASH_WORKER=stock to serve it with SGLang's own worker"


class NotSupported(ValueError):
    """Error for valid input that this version of the plugin cannot serve exactly."""


class HostMismatch(RuntimeError):
    """Error for an installed SGLang that lacks a name or a parameter listed in `host/sglang-0.5.23.txt`."""
