"""Errors of server processes."""


class ServerError(RuntimeError):
    """Error for a server that could not be started, died, or answered with an error."""
