"""Patches of SGLang 0.5.23 for reference servers without speculation, which have this folder on PYTHONPATH.

Order of penalties: without the overlap schedule SGLang keeps its penalizers in a set, so the order of additive and
scaling penalties differs from process to process. With the overlap schedule, and with these patches, additive penalties
come first.

Seeds: SGLang reads `sampling_seed` only in its deterministic mode, which it refuses on a CPU. The mode needs attention
and matrix products that do not depend on the batch, and a kernel that hashes seeds. In fp32 the tiny pair's answers do
not depend on the batch, and `hash_in_torch` replaces the kernel. All servers of a comparison with seeds have these
patches.

Python imports `sitecustomize` first, so the modules of `EDITS` are patched right after they are loaded.
"""

from after_loading import edit_after_loading

MASK = 0xFFFFFFFF


def allow_torch_native(choices) -> None:
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def leave_products_alone(batch_invariant_ops) -> None:
    batch_invariant_ops.enable_batch_invariant_mode = lambda: None


def hash_in_torch(murmur_hash) -> None:
    def murmur_hash32(seed, positions, col_indices):
        """Hash each row's seed and position with each column; [n, m], int64 below 2**32."""
        x_NM = (seed.long() * 0x9E3779B1 + positions.long() * 0x85EBCA77)[:, None] + col_indices.long() * 0xC2B2AE3D
        for shift, factor in ((16, 0x7FEB352D), (15, 0x2C1B3C6D), (16, 0x297A2D39)):
            x_NM = ((x_NM & MASK) ^ ((x_NM & MASK) >> shift)) * factor
        return (x_NM & MASK) ^ ((x_NM & MASK) >> 16)

    murmur_hash.murmur_hash32 = murmur_hash32


def additive_first(orchestrator) -> None:
    made = orchestrator.BatchedPenalizerOrchestrator.__init__

    def init(self, *args, **kwargs) -> None:
        made(self, *args, **kwargs)
        self.penalizers = dict(sorted(self.penalizers.items(), key=lambda pair: pair[0].is_multiplicative))

    orchestrator.BatchedPenalizerOrchestrator.__init__ = init


EDITS = {
    "sglang.srt.sampling.penaltylib.orchestrator": additive_first,
    "sglang.srt.arg_groups.choices": allow_torch_native,
    "sglang.srt.batch_invariant_ops": leave_products_alone,
    "sglang.kernels.ops.sampling.murmur_hash": hash_in_torch,
}


edit_after_loading(EDITS)
