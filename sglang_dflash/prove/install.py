"""Entry points for a machine where the package cannot be installed: offline, and without a build backend.

SGLang finds plugins by the metadata of distributions on the path. `install(folder)` writes that metadata, and links to
both packages, into a folder that is on PYTHONPATH; SGLang's own processes inherit the path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import sglang_dflash
from sglang_dflash import __version__
from sglang_dflash.check.findings import ENTRY_POINTS

PACKAGE = Path(sglang_dflash.__file__).parent
KERNELS = ("sglang_dflash_kernels", "kernels")  # beside the package: as it is installed, and in a checkout


def install(folder: Path) -> Iterator[Path]:
    """Yields what was written or linked.

    Raises:
        ValueError: the kernels are not beside the package, or something else has a link's name.
    """
    info = folder / f"sglang_dflash-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang-dflash\nVersion: {__version__}\n")
    sections = (f"[{group}]\n{name} = {value}\n" for group, (name, value) in ENTRY_POINTS.items())
    (info / "entry_points.txt").write_text("\n".join(sections))
    yield info
    kernels = next((PACKAGE.parent / name for name in KERNELS if (PACKAGE.parent / name).is_dir()), None)
    if kernels is None:
        raise ValueError(f"neither {' nor '.join(KERNELS)} is beside {PACKAGE}; copy it there")
    for name, source in (("sglang_dflash", PACKAGE), (KERNELS[0], kernels)):
        yield link(folder / name, source)


def link(at: Path, source: Path) -> Path:
    if at.resolve() == source.resolve():
        return at
    if at.is_symlink():
        at.unlink()
    elif at.exists():
        raise ValueError(f"{at} exists and is no link; remove it, or choose another folder")
    at.symlink_to(source, target_is_directory=True)
    return at
