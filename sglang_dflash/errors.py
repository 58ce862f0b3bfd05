"""Errors of this package. A message is one sentence: the input, the value found and the cure.

Wrong input (a bad checkpoint, a contradictory flag) raises ValueError. Valid input that this plugin cannot serve
exactly raises NotSupported. A model that cannot be downloaded raises NoModelError. An SGLang that this plugin does not
support raises HostMismatch.
"""

# Cure in error messages about launches that SGLang's own worker may be able to serve.
STOCK = "serve it with SGLang's own worker (SGLANG_DFLASH_WORKER=stock)"


class NotSupported(ValueError):
    """Error for valid input that this version of the plugin cannot serve exactly."""


class NoModelError(RuntimeError):
    """Error for a model that is not available on this machine."""


class HostMismatch(RuntimeError):
    """Error if SGLang has another version, lacks a name in `engine/host/sglang-0.5.23.txt`, or did not apply a hook."""
