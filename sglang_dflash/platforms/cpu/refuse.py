"""Check that a stand-in got no argument that it does not support."""

from collections.abc import Mapping


def refuse(op: str, arguments: Mapping[str, object]) -> None:
    """Raise NotImplementedError for the first argument that is neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{op}: {name} is not defined on the CPU platform; run this model on a GPU")
