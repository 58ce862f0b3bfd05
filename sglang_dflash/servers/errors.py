"""Error that ends a program which started servers."""


class ServerError(RuntimeError):
    """Error for a server that could not be started, died, or answered with an error."""
