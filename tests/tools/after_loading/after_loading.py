"""Edits modules of a process from outside: each once, as soon as it is loaded, before it is used.

For `sitecustomize` modules, which Python imports before anything else. `parameters.path_with` puts this folder on
PYTHONPATH beside theirs. No production code knows of this.
"""

import importlib.abc
import importlib.util
import sys


class AfterLoading(importlib.abc.MetaPathFinder):
    """Finds modules as they would be found, and edits each once it is loaded."""

    def __init__(self, edits):
        self.edits = dict(edits)

    def find_spec(self, name, path, target=None):
        edit = self.edits.pop(name, None)
        if edit is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_edit(module):
            load(module)
            edit(module)

        spec.loader.exec_module = load_and_edit
        return spec


def edit_after_loading(edits):
    """`edits`: a function of the module, by the module's name."""
    sys.meta_path.insert(0, AfterLoading(edits))
