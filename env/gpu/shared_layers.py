"""SGLang plugin that keeps one layer's matrices per kind of layer, for servers with random weights.

All layers of Qwen3.5's linear attention use the matrices of the first such layer, and so do all layers with full
attention. A layer's matrices are far larger than the GPU's L2 cache. So a step still reads each layer's bytes from the
GPU's memory, and the launches are the same. Three servers of a 27B target then fit on one card. Vectors and
convolutions remain per layer.

`steps.py` puts the plugin's metadata on the PYTHONPATH of its servers. In all their processes SGLang calls `register`.
"""

import importlib.abc
import importlib.util
import sys

MODULE = "sglang.srt.models.qwen3_5"
CLASSES = "Qwen3_5LinearDecoderLayer", "Qwen3_5AttentionDecoderLayer"
MARK = "shares its matrices with the first"  # in one printed line per layer that has none of its own


def register():
    """Edit the classes of the model's module, now or as soon as the module is loaded."""
    if MODULE in sys.modules:
        edit(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, AfterLoading())


class AfterLoading(importlib.abc.MetaPathFinder):
    """Finder that leaves the lookup of modules unchanged, and edits `MODULE` once it is loaded."""

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_edit(module):
            load(module)
            edit(module)

        spec.loader.exec_module = load_and_edit
        return spec


def edit(module):
    for name in CLASSES:
        share(vars(module)[name])


def share(layer_class):
    """Make every further layer of a class use the first layer's matrices. A further layer's own are freed at once."""
    create, first = layer_class.__init__, []

    def create_and_share(self, *arguments, **named):
        create(self, *arguments, **named)
        if not first:
            first.append(self)
            allow_shared_reads()
            return
        n_bytes = replace_matrices(self, first[0])
        print(f"{layer_class.__name__} {MARK}: {n_bytes / 2**20:.1f} MiB", flush=True)

    layer_class.__init__ = create_and_share


def allow_shared_reads():
    """In the GPU emulation disable the rule that a captured forward reads no weight twice."""
    if cost := sys.modules.get("sglang_dflash.platforms.rehearsal.cost"):
        cost.require_one_read = lambda nodes: None


def replace_matrices(layer, first):
    """Replace the two-dimensional parameters of a layer by those of an equal layer; return the number of bytes."""
    n_bytes = 0
    for module, like in zip(layer.modules(), first.modules(), strict=True):
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dim() != 2:
                continue
            shared = like._parameters[name]
            assert shared.shape == parameter.shape, f"{name}: {tuple(parameter.shape)}, not {tuple(shared.shape)}"
            module._parameters[name] = shared
            n_bytes += shared.nbytes
    return n_bytes
