"""Files for a process that takes the installed SGLang for another version."""

from pathlib import Path

VERSION = "9.9.9"
SITE = f'''"""Give SGLang another version."""

import sys
from types import ModuleType

sys.modules["sglang.version"] = version = ModuleType("sglang.version")
version.__version__ = "{VERSION}"
version.__version_tuple__ = (9, 9, 9)
'''


def write(folder: Path) -> Path:
    """Write a `sitecustomize` module to `folder`, which belongs on PYTHONPATH."""
    (folder / "sitecustomize.py").write_text(SITE)
    return folder
