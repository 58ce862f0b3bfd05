"""Prompts about the code and documentation of installed packages."""

from pathlib import Path

import pytest

from sglang_dflash.pairs.smollm2 import sources


def test_tasks_take_functions_headers_and_documentation(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    source = '"""' + "Text of a module. " * 15 + '"""\n\n\nclass A:\n'
    source += '    def double(x):\n        """Double it."""\n        y = x\n        y = y + x\n        return y\n'
    (tmp_path / "a.py").write_text(source)
    (tmp_path / "tests" / "b.py").write_text(source.replace("double", "triple"))
    (tmp_path / "template.py").write_text("{{ not python }")
    (tmp_path / "binary.py").write_text("x = 1\0")
    found = [messages[0]["content"] for messages in sources.tasks([tmp_path], 12, 0)]
    assert len(found) == 3
    header = '```python\ndef double(x):\n    """Double it."""\n'
    assert any(f"{header}    y = x\n" in text for text in found)
    assert any(f"{header}```" in text for text in found)
    assert any("Text of a module." in text for text in found)


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ValueError, match="package human_evil is not installed; pip install human-evil"):
        sources.folder_of("human_evil")
