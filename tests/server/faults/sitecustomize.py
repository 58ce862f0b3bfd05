"""Put a fault into every process that has this folder on PYTHONPATH, to test that tests notice it.

The variable `FAULT` names one of the functions below. Each is a mistake that changes nothing on a server without
captured graphs and streams.
"""

import os

from after_loading import edit_after_loading

DRAFTER, VERIFIER = "sglang_dflash.engine.stages.drafter", "sglang_dflash.engine.stages.verifier"
ENGINES = "sglang_dflash.engine.stages.engines"
DRAFT_MODEL = "sglang_dflash.engine.draft.sglang_model"
SCHEDULER = "sglang.srt.managers.scheduler"
QWEN = "sglang.srt.models.qwen3_5"
FLASH_ATTENTION = "sglang.srt.layers.attention.flashattention_backend"


def drafts_in_the_graph(drafter) -> None:
    """Return drafts in the captured graph's own memory instead of a copy. A later replay overwrites them."""
    draft = drafter.Drafter.draft

    def draft_uncopied(self, plan, *, graphs):
        forward, drafted = self.forward, []

        def forward_recorded(batch):
            output = forward(batch)
            drafted.append(output.logits_output.hidden_states)
            return output

        self.forward = forward_recorded
        tokens_BN = draft(self, plan, graphs=graphs)
        self.forward = forward
        return drafted[0].view(plan.drafted.tokens_BN.shape)[:, : plan.width] if drafted else tokens_BN

    drafter.Drafter.draft = draft_uncopied


def a_value_read_in_the_draft(draft_model) -> None:
    """Read a device value on the host in the draft's forward."""
    forward = draft_model.DFlashDraftModel.forward

    def forward_with_sync(self, input_ids, positions, forward_batch):
        assert positions.max().item() >= 0
        return forward(self, input_ids, positions, forward_batch)

    draft_model.DFlashDraftModel.forward = forward_with_sync


def a_host_length_in_the_draft(draft_model) -> None:
    """Compute the draft's positions from a length on the host. A captured graph keeps the length of its capture."""
    import torch

    forward = draft_model.DFlashDraftModel.forward

    def forward_with_host_length(self, input_ids, positions, forward_batch):
        first = int(forward_batch.seq_lens_cpu[0])
        return forward(self, input_ids, torch.arange(first, first + positions.numel()), forward_batch)

    draft_model.DFlashDraftModel.forward = forward_with_host_length


def a_page_table_in_new_memory(flash_attention) -> None:
    """Write the page table of a replay into new memory, which no captured kernel reads."""
    backend = flash_attention.FlashAttentionBackend
    prepare = backend._set_decode_page_metadata

    def prepare_in_new_memory(self, plan, metadata, *others, **named):
        metadata.page_table = metadata.page_table.clone()
        prepare(self, plan, metadata, *others, **named)

    backend._set_decode_page_metadata = prepare_in_new_memory


def own_index_buffers(engines) -> None:
    """Keep the index buffers that SGLang allocates for each verify width."""
    engines.share_buffers = lambda backend, widest: None


def prompts_on_the_last_width(verifier) -> None:
    """Keep the attention backend of the last verify width when the target prefills prompts."""
    verifier.Verifier.restore = lambda self: None


def a_barrier_left_out(scheduler) -> None:
    """Skip a barrier: the scheduler then writes to the request table while the previous forward may still read it."""
    scheduler.Scheduler._apply_war_barrier = lambda self: None


def a_branch_not_forked(qwen) -> None:
    """Project Gated DeltaNet's gates on a second stream that does not wait for the first (no fork)."""
    _project_without_wait(qwen, lambda layer: layer.alt_stream)


def a_branch_not_joined(qwen) -> None:
    """Project Gated DeltaNet's gates on a second stream, and use them before it has finished (no join)."""
    _project_without_wait(qwen, lambda layer: qwen.torch.cuda.current_stream())


def _project_without_wait(qwen, stream_of) -> None:
    project = qwen.Qwen3_5GatedDeltaNet._forward_input_proj

    def project_without_wait(self, hidden_states):
        stream = stream_of(self)
        stream.wait_stream = lambda other: None
        try:
            return project(self, hidden_states)
        finally:
            del stream.wait_stream

    qwen.Qwen3_5GatedDeltaNet._forward_input_proj = project_without_wait


FAULTS = {
    fault.__name__: (fault, module)
    for fault, module in (
        (drafts_in_the_graph, DRAFTER), (a_value_read_in_the_draft, DRAFT_MODEL),
        (a_host_length_in_the_draft, DRAFT_MODEL), (a_page_table_in_new_memory, FLASH_ATTENTION),
        (own_index_buffers, ENGINES), (prompts_on_the_last_width, VERIFIER), (a_barrier_left_out, SCHEDULER),
        (a_branch_not_forked, QWEN), (a_branch_not_joined, QWEN),
    )
}  # fmt: skip
fault, module = FAULTS[os.environ["FAULT"]]


def put_in(loaded) -> None:
    fault(loaded)
    print(f"fault put in: {fault.__name__}", flush=True)


edit_after_loading({module: put_in})
