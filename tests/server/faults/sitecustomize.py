"""Puts a fault into processes that have this folder on PYTHONPATH: `FAULT` names one of the functions below.

Each is a mistake that a server without captured graphs and streams does not show. No production code knows of this.
"""

import os

from after_loading import edit_after_loading

DRAFTER, VERIFIER = "sglang_dflash.stages.drafter", "sglang_dflash.stages.verifier"
DRAFT_MODEL = "sglang_dflash.draft.sglang_model"
SCHEDULER = "sglang.srt.managers.scheduler"
QWEN = "sglang.srt.models.qwen3_5"
FLASH_ATTENTION = "sglang.srt.layers.attention.flashattention_backend"


def drafts_in_the_graph(drafter) -> None:
    """Drafts stay in the memory of the graph that made them."""
    draft = drafter.Drafter.draft

    def uncopied(self, plan, *, graphs):
        forward, drafted = self.forward, []

        def record(batch):
            output = forward(batch)
            drafted.append(output.logits_output.hidden_states)
            return output

        self.forward = record
        tokens_BN = draft(self, plan, graphs=graphs)
        self.forward = forward
        return drafted[0].view(plan.drafted.tokens_BN.shape)[:, : plan.width] if drafted else tokens_BN

    drafter.Drafter.draft = uncopied


def a_value_read_in_the_draft(draft_model) -> None:
    """The draft waits for the device."""
    forward = draft_model.DFlashDraftModel.forward

    def waiting(self, input_ids, positions, forward_batch):
        assert positions.max().item() >= 0
        return forward(self, input_ids, positions, forward_batch)

    draft_model.DFlashDraftModel.forward = waiting


def a_host_length_in_the_draft(draft_model) -> None:
    """The draft computes positions of a length on the host: right when it is run, frozen when it is captured."""
    import torch

    forward = draft_model.DFlashDraftModel.forward

    def frozen(self, input_ids, positions, forward_batch):
        first = int(forward_batch.seq_lens_cpu[0])
        return forward(self, input_ids, torch.arange(first, first + positions.numel()), forward_batch)

    draft_model.DFlashDraftModel.forward = frozen


def a_page_table_in_new_memory(flash_attention) -> None:
    """A backend plans a replay into memory that no captured kernel knows."""
    backend = flash_attention.FlashAttentionBackend
    prepare = backend._set_decode_page_metadata

    def elsewhere(self, plan, metadata, *others, **named):
        metadata.page_table = metadata.page_table.clone()
        prepare(self, plan, metadata, *others, **named)

    backend._set_decode_page_metadata = elsewhere


def prompts_on_the_last_width(verifier) -> None:
    """The target reads prompts on the attention backend of whichever width was verified last."""
    verifier.Verifier.restore = lambda self: None


def a_barrier_left_out(scheduler) -> None:
    """The scheduler writes a request's row while the forward before may still read it."""
    scheduler.Scheduler._apply_war_barrier = lambda self: None


def a_branch_not_forked(qwen) -> None:
    """Gated DeltaNet's gates are projected on another stream, which waits for nothing."""
    _project_forgetting(qwen, lambda layer: layer.alt_stream)


def a_branch_not_joined(qwen) -> None:
    """Gated DeltaNet's gates are projected on another stream, and nothing waits for it."""
    _project_forgetting(qwen, lambda layer: qwen.torch.cuda.current_stream())


def _project_forgetting(qwen, stream_of) -> None:
    project = qwen.Qwen3_5GatedDeltaNet._forward_input_proj

    def forgetting(self, hidden_states):
        stream = stream_of(self)
        stream.wait_stream = lambda other: None
        try:
            return project(self, hidden_states)
        finally:
            del stream.wait_stream

    qwen.Qwen3_5GatedDeltaNet._forward_input_proj = forgetting


FAULTS = {
    fault.__name__: (fault, module)
    for fault, module in (
        (drafts_in_the_graph, DRAFTER),
        (a_value_read_in_the_draft, DRAFT_MODEL),
        (a_host_length_in_the_draft, DRAFT_MODEL),
        (a_page_table_in_new_memory, FLASH_ATTENTION),
        (prompts_on_the_last_width, VERIFIER),
        (a_barrier_left_out, SCHEDULER),
        (a_branch_not_forked, QWEN),
        (a_branch_not_joined, QWEN),
    )
}
fault, module = FAULTS[os.environ["FAULT"]]


def put_in(loaded) -> None:
    fault(loaded)
    print(f"fault put in: {fault.__name__}", flush=True)


edit_after_loading({module: put_in})
