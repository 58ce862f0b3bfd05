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
    Name("sglang.kernels.ops.attention.flash_attention_v4", "flash_attn_with_kvcache"),
    Name("sglang.kernels.ops.attention.flash_attention_v4", "flash_attn_varlen_func"),
    Name("sglang.srt.layers.attention.attention_registry", "ATTENTION_BACKENDS"),
    Name("sglang.srt.layers.attention.attention_registry", "get_device_capability", "device_id"),
    Name("sglang.srt.layers.attention.flashattention_backend", "get_device_capability", "device_id"),
    Name("sglang.srt.model_executor.model_runner_components.attention_backend_setup", "attn_backend_wrapper"),
    Name("sglang.srt.arg_groups.attention_hook", "get_platform"),
    Name("sglang.srt.arg_groups.attention_hook", "_fa4_page_constraint", "view"),
    Name("sglang.srt.runtime_context", "override_platform"),
    Name("sglang.srt.runtime_context", "PlatformContext", "_install"),
    Name("sglang.srt.utils", "is_blackwell"),
    Name("sglang.srt.utils", "is_flashinfer_available"),
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
    # layers of single families
    Name("sglang.srt.layers.moe.fused_moe_native", "moe_forward_native", "layer x topk_output moe_runner_config"),
    Name("sglang.srt.layers.quantization.unquant", "UnquantizedFusedMoEMethod", "use_triton_kernels with_bias"),
    Name("sglang.kernels.ops.kvcache.mla_buffer", "set_mla_kv_buffer_naive", "kv_buffer loc cache_k_nope cache_k_rope"),
    Name("sglang.kernels.ops.activation.softcap", "_softcap_logits", "full_logits final_logit_softcapping output"),
    Name("sglang.srt.models.minimax_m2", "rms_sumsq_serial", "x1 x2"),
    Name("sglang.srt.models.minimax_m2", "rms_apply_serial", "x1 x2 w1 w2 sum_sq tp_world eps"),
    Name("sglang.srt.layers.layernorm", "Gemma4RMSNorm", "with_scale"),
)

# With `,streams`.
STREAMS = (
    Name("sglang.srt.utils.common", "async_d2h", "tensor"),
    Name("sglang.srt.managers.scheduler", "Scheduler", "run_event_loop _apply_war_barrier"),
    Name("sglang.srt.managers.overlap_utils", "_is_cuda"),
    Name("sglang.srt.model_executor.runner.decode_cuda_graph_runner", "make_external_event", "device_module"),
    Name("sglang.srt.model_executor.forward_batch_info", "compute_position_torch"),
    Name("sglang.srt.mem_cache.allocation", "write_cache_indices"),
    Name("sglang.srt.model_executor.cuda_graph_buffer_registry", "CudaGraphBufferRegistry", "fill_from"),
)

# Of FlashInfer. Checked when a backend over it is made: importing it takes seconds.
FLASHINFER = (
    *(
        Name(f"flashinfer.{module}", question, "device")
        for module in ("utils", "decode", "prefill", "xqa")
        for question in ("get_compute_capability", "get_device_sm_count")
    ),
    Name("flashinfer.prefill", "get_batch_prefill_module", "backend args"),
    Name("flashinfer.prefill", "get_fmha_module"),
    Name("flashinfer.prefill", "fmha_varlen_plan"),
    Name("flashinfer.prefill", "get_trtllm_gen_fmha_module"),
    Name("flashinfer.prefill", "get_trtllm_fmha_v2_module"),
    Name("flashinfer.decode", "get_batch_prefill_module", "backend args"),
    Name("flashinfer.decode", "get_batch_decode_module", "args"),
    Name("flashinfer.decode", "get_trtllm_gen_fmha_module"),
    Name("flashinfer.xqa", "get_xqa_module"),
    Name("flashinfer.cascade", "get_cascade_module"),
)
