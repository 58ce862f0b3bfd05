"""What the rehearsal needs of SGLang beside `host_names.py`. Checked when the rehearsal's platform is set up."""

from sglang_dflash.host_names import Name

FLASH_ATTENTION = "sglang.kernels.ops.attention.flash_attention"

REHEARSAL = (
    Name(
        FLASH_ATTENTION,
        "flash_attn_with_kvcache",
        "q k_cache v_cache page_table cache_seqlens cu_seqlens_q max_seqlen_q softmax_scale causal window_size softcap "
        "sinks qv return_softmax_lse cu_seqlens_k_new scheduler_metadata num_splits ver",
    ),
    Name(
        FLASH_ATTENTION,
        "flash_attn_varlen_func",
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal window_size softcap "
        "return_softmax_lse num_splits ver",
    ),
    Name("sglang.srt.distributed.parallel_state", "get_current_device_stream_fast"),
    Name("sglang.srt.model_executor.model_runner_components.cuda_graph_setup", "get_flags"),
    Name(
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph",
        "_weak_ref_if_tensor",
    ),
    Name(
        "sglang.srt.layers.attention.flashattention_backend",
        "FlashAttentionBackend",
        "_get_scheduler_metadata",
    ),
)
