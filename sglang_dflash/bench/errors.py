"""What ends a benchmark: one sentence for the person who started it."""


class ServerError(RuntimeError):
    """The server could not be started, died, or answered with an error."""


class GateError(RuntimeError):
    """Answers differ between arms where they must not: there is no speed to show."""
