"""Import hook that edits each named module once, right after it is loaded.

Python imports `sitecustomize` first. A test's `sitecustomize.py` uses this hook to patch the processes of the test.
`parameters.path_with` puts its folder and this one on PYTHONPATH. Only tests use this module.
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
