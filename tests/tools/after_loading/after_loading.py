"""Patches of a process from outside: each module is edited once, after it is loaded and before it is used.

For `sitecustomize` modules, which Python imports first, before the modules that they edit. `parameters.path_with` puts
this folder on PYTHONPATH together with theirs. Production code does not depend on this.
"""

import importlib.abc
import importlib.util
import sys


class AfterLoading(importlib.abc.MetaPathFinder):
    """Finder that leaves module lookup unchanged and edits each module once it is loaded."""

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
    """Apply `edits`: module name -> function that edits the module."""
    sys.meta_path.insert(0, AfterLoading(edits))
