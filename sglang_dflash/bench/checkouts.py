"""Two checkouts of this plugin in one run: an arm whose PYTHONPATH names another, `ours:PYTHONPATH=/other/checkout`.

By itself that path gives half of the other checkout. Its kernels lie under another name than they are imported by, so
an editable installation lends its own; and where the benchmark runs in a checkout, `python -m` looks there first.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from sglang_dflash.servers.errors import ServerError

PACKAGE, KERNELS = "sglang_dflash", "sglang_dflash_kernels"
WHERE = f"import {PACKAGE}, {KERNELS}; print(*(next(iter(one.__path__)) for one in ({PACKAGE}, {KERNELS})), sep='\\n')"


def named(env: Mapping[str, str]) -> Path | None:
    """The folder on PYTHONPATH that holds the package; None where none does."""
    parts = (Path(part) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part)
    return next((part.resolve() for part in parts if (part / PACKAGE / "__init__.py").is_file()), None)


def environment(env: Mapping[str, str], links: Path) -> dict[str, str]:
    """`env`, with which package and kernels are both imported from the folder that PYTHONPATH names, if it does.

    Args:
        links: a folder for a link to the kernels.

    Raises:
        ServerError: they are not.
    """
    checkout = named(env)
    if checkout is None:
        return dict(env)
    link, path = links.resolve() / KERNELS, env["PYTHONPATH"]
    if not (checkout / KERNELS).exists():  # not a `pip install --target`
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(checkout / "kernels")
        path = f"{link.parent}{os.pathsep}{path}"
    whole = {**env, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    asked = subprocess.run([sys.executable, "-c", WHERE], env=os.environ | whole, capture_output=True, text=True)
    found = [Path(line).resolve() for line in asked.stdout.splitlines()]
    if [one.parent for one in found] != [checkout, checkout]:
        said = ", ".join(map(str, found)) or (asked.stderr.splitlines() or ["nothing"])[-1]
        raise ServerError(f"PYTHONPATH={checkout}: package and kernels are not imported from there ({said}); mend it")
    return whole
