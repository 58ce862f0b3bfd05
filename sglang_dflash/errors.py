"""The two ways a launch is stopped. Each message is one sentence: what, what was found, what to do.

Wrong input (a bad checkpoint, a contradictory flag) is a plain ValueError.
"""


class NotSupported(ValueError):
    """The input is valid, but this version of the plugin cannot serve it exactly."""


class HostMismatch(RuntimeError):
    """The installed SGLang lacks a name or a parameter that `host.py` lists."""
