"""The error that ends a program which started servers."""


class ServerError(RuntimeError):
    """The server could not be started, died, or answered with an error."""
