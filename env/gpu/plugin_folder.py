"""Make a folder for PYTHONPATH from which the plugin of this checkout can be imported, as if it were installed.

    python env/gpu/plugin_folder.py FOLDER

The folder has a link per package of pyproject.toml, and metadata with its entry points, by which SGLang finds the
plugin. It needs only the standard library.
"""

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    """Return the text of `entry_points.txt`."""
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in groups.items()
    )


def write_metadata(folder: Path, name: str, version: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of a distribution with these entry points into `folder`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points(groups))


def make(folder: Path) -> None:
    """Fill `folder`. Links to another checkout are replaced."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, tools = settings["project"], settings["tool"]["setuptools"]
    init = (ROOT / "sglang_dflash" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"', init, re.MULTILINE)
    assert found is not None, "sglang_dflash/__init__.py has no __version__"
    folder.mkdir(parents=True, exist_ok=True)
    for package in tools["packages"]:
        if "." not in package:
            link = folder / package
            link.unlink(missing_ok=True)
            link.symlink_to(ROOT / tools["package-dir"].get(package, package))
    groups = project["entry-points"] | {"console_scripts": project["scripts"]}
    write_metadata(folder, project["name"], found[1], groups)


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
