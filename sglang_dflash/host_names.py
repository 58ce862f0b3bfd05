"""Every SGLang name this package hooks, overrides or calls: the data of the host contract.

One line per name. Add one when you import a name, override a method or rely on a parameter; `tests/host` fails until
you do. `host.py` compares the table with the SGLang that is running.
"""

from typing import NamedTuple

SGLANG = "0.5.23"
# Modules with several names in the table.
SPEC_UTILS = "sglang.srt.speculative.spec_utils"
VERIFY = "sglang.srt.speculative.dflash_info"
DFLASH = "sglang.srt.speculative.dflash_utils"
BATCH = "sglang.srt.managers.schedule_batch"
GDN = "sglang.srt.layers.attention.linear.gdn_backend"
MAMBA_COPY = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
RADIX = "sglang.srt.layers.radix_attention"
ATTENTION = "sglang.srt.layers.attention.base_attn_backend"
BASE_WORKER = "sglang.srt.speculative.base_spec_worker"
CONTEXT = "sglang.srt.runtime_context"
GRAPHS = "sglang.srt.model_executor.cuda_graph_config"
POOL = "sglang.srt.mem_cache.memory_pool"
SIZING = "sglang.srt.mem_cache.allocation_sizing"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info"
WEIGHTS = "sglang.srt.model_executor.model_runner_components.weight_updater"
TP_SYNC = "sglang.srt.speculative.spec_tp_sync"
MODEL_RUNNER = "sglang.srt.model_executor.model_runner"
FORWARD_CONTEXT = "sglang.srt.model_executor.forward_context"


class Name(NamedTuple):
    """One name of the host.

    Attributes:
        module: where it is defined or re-exported.
        qualname: `function`, `Class` or `Class.method`.
        members: blank-separated; a function's parameters, or a class's fields, methods and instance attributes.
    """

    module: str
    qualname: str
    members: str = ""


# What `plugin.register` itself needs. Checked in every process.
SEAMS = (
    Name("sglang.srt.plugins.hook_registry", "HookRegistry", "register apply_hooks _patched"),
    Name("sglang.srt.plugins.hook_registry", "HookRegistry.register", "target hook hook_type"),
    Name("sglang.srt.plugins.hook_registry", "HookType", "AROUND AFTER"),
    Name("sglang.srt.arg_groups.resolution_hooks", "register_resolution_hook", "name"),
    Name("sglang.srt.arg_groups.pipeline", "run_resolution_pipeline", "server_args"),
    Name("sglang.srt.arg_groups.overrides", "resolving_view", "server_args"),
    Name("sglang.srt.arg_groups.overrides", "declare_resolution", "server_args source"),
    Name("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm", "is_dflash DFLASH"),
    Name("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm.create_worker", "server_args"),
    Name("sglang.srt.server_args", "ServerArgs", "add_cli_args"),
    Name("sglang.srt.arg_groups.choices", "DRAFT_ATTENTION_BACKEND_CHOICES"),
    Name("sglang.srt.arg_groups.choices", "add_draft_attention_backend_choices"),
    Name("sglang.srt.platforms", "current_platform"),
)

# What the rest of the package needs. Checked when DFLASH is served.
NAMES = (
    # arguments and models, before a worker exists
    Name("sglang.srt.plugins", "load_plugins"),
    Name(
        "sglang.srt.managers.scheduler_components.internal_state",
        "SchedulerInternalStateController",
        "get_internal_state scheduler",
    ),
    Name("sglang.srt.managers.io_struct", "GetInternalStateReqOutput", "internal_state"),
    Name("sglang.srt.server_args", "prepare_server_args", "argv"),
    Name("sglang.srt.arg_groups.overrides", "attention_backends_of", "cfg"),
    Name("sglang.srt.arg_groups.model_override_base", "model_config_of", "server_args"),
    Name(
        "sglang.srt.arg_groups.fields.spec",
        "Spec",
        "speculative_algorithm speculative_draft_model_path speculative_draft_model_revision speculative_num_steps "
        "speculative_eagle_topk speculative_num_draft_tokens speculative_dflash_block_size "
        "speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling "
        "speculative_use_block_verification speculative_draft_attention_backend speculative_draft_kv_cache_dtype "
        "speculative_draft_window_size speculative_draft_sink_size speculative_draft_model_quantization "
        "_speculative_draft_quantization_explicitly_set speculative_adaptive",
    ),
    Name("sglang.srt.arg_groups.fields.serving", "Serving", "enable_streaming_session"),
    Name("sglang.srt.configs.hybrid_arch", "mambaish_config", "model_config"),
    Name(
        "sglang.srt.configs.model_config",
        "ModelConfig",
        "model_path hf_config hf_text_config hidden_size vocab_size dtype context_len",
    ),
    Name("sglang.srt.models.registry", "ModelRegistry", "models"),
    *(Name(CONTEXT, name) for name in ("get_exec", "get_spec", "get_parallel", "get_schedule")),
    Name(CONTEXT, "attn_dp_enabled_of", "cfg"),
    Name("sglang.srt.environ", "envs", "SGLANG_EAGER_INPUT_NO_COPY SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    Name(CONTEXT, "mamba_track_grid", "tree_page"),
    # what the scheduler asks of a worker, and what it hands over
    Name(BASE_WORKER, "BaseSpecWorker", "target_worker draft_worker spec_v2_attn_backends on_verify_complete_cpu"),
    Name(
        BASE_WORKER,
        "BaseSpecWorker.alloc_memory_pool",
        "memory_pool_config req_to_token_pool token_to_kv_pool_allocator",
    ),
    *(
        Name(BASE_WORKER, f"BaseSpecWorker.{method}")
        for method in (
            *("init_attention_backends", "init_cuda_graphs", "prewarm_sampling", "weight_update_runners"),
            "clear_cache_pool",
        )
    ),
    Name(
        BATCH,
        "Req",
        "sampling_params return_hidden_states return_sampling_mask kv origin_input_ids output_ids eos_token_ids "
        "tokenizer finished finished_reason finished_len to_finish is_retracted grammar _compute_max_prefix_len",
    ),
    Name(BATCH, "Req.update_finish_state", "new_accepted_len"),
    Name("sglang.srt.session.session_controller", "Session", "req_nodes"),
    Name("sglang.srt.session.session_controller", "Session.create_req", "req"),
    Name("sglang.srt.session.session_controller", "SessionReqNode", "req"),
    Name(WEIGHTS, "WeightUpdater.update_weights_from_disk", "model_path recapture_cuda_graph"),
    Name(WEIGHTS, "WeightUpdater", "get_model"),
    Name(
        "sglang.srt.sampling.sampling_params",
        "SamplingParams",
        "frequency_penalty presence_penalty repetition_penalty min_new_tokens stop_token_ids stop_strs stop_regex_strs",
    ),
    Name("sglang.srt.layers.sampler", "apply_custom_logit_processor", "logits sampling_batch_info num_tokens_in_batch"),
    Name(
        BATCH,
        "ScheduleBatch",
        "batch_size maybe_evict_swa spec_info seq_lens seq_lens_cpu seq_lens_sum out_cache_loc req_pool_indices "
        "req_pool_indices_cpu reqs forward_mode is_extend_in_batch prefix_lens extend_lens sampling_info has_grammar "
        "return_logprob tree_cache mamba_track_indices can_run_decode_cuda_graph token_to_kv_pool_allocator "
        "req_to_token_pool device",
    ),
    Name("sglang.srt.managers.tp_worker", "TpModelWorker", "model_runner device"),
    Name(
        "sglang.srt.managers.tp_worker",
        "TpModelWorker.forward_batch_generation",
        "batch forward_batch is_verify skip_attn_backend_init capture_hidden_mode",
    ),
    Name(
        "sglang.srt.managers.utils",
        "GenerationBatchResult",
        "logits_output next_token_ids accept_lens can_run_cuda_graph speculative_num_draft_tokens new_seq_lens "
        "next_draft_input extra_keep_alive_refs cap_lens num_correct_drafts_per_req_cpu "
        "expert_distribution_metrics routed_experts_output indexer_topk_output",
    ),
    Name("sglang.srt.layers.logprob_processor", "compute_spec_logprobs", "batch logits_output predict chain_stride"),
    Name(
        "sglang.srt.speculative.draft_worker_common",
        "build_draft_tp_worker",
        "server_args gpu_id nccl_port target_model_config algo_label attention_backend_override",
    ),
    Name("sglang.srt.speculative.spec_info", "SpecInput", "num_tokens_per_req num_tokens_for_logprob_per_req"),
    Name("sglang.srt.speculative.spec_info", "SpecInput.__init__", "spec_input_type"),
    Name("sglang.srt.speculative.spec_info", "SpecInputType", "DFLASH_DRAFT"),
    Name(VERIFY, "DFlashVerifyInput", "draft_token positions draft_token_num capture_hidden_mode kv_loc_plan"),
    Name(VERIFY, "DFlashVerifyInput.prepare_for_verify", "batch target_worker defer_metadata_init"),
    Name(TP_SYNC, "SpecTpSync", "sync"),
    Name(TP_SYNC, "SpecTpSyncSite", "DFLASH_TARGET DFLASH_ACCEPT_GREEDY DFLASH_ACCEPT_SAMPLE"),
    Name(SPEC_UTILS, "GrammarTree", "from_linear_chain"),
    Name(SPEC_UTILS, "build_grammar_vocab_mask", "reqs tree sampling_info device barrier"),
    Name(
        SPEC_UTILS,
        "commit_mamba_states_after_verify",
        "target_worker batch accept_lens accept_index draft_token_num prepared_step_indices",
    ),
    # memory
    Name(
        "sglang.srt.mem_cache.allocation",
        "alloc_for_spec_decode",
        "tree_cache req_to_token_pool reqs req_pool_indices cur_kv_lens cur_kv_lens_cpu nxt_kv_lens nxt_kv_lens_cpu "
        "num_needed_tokens batch",
    ),
    Name(SIZING, "get_alloc_reserve_per_decode"),
    Name(SIZING, "page_aligned_decode_alloc_lens", "reqs reserve page_size"),
    Name(
        POOL,
        "MambaPool",
        "mamba_cache SpeculativeState _intermediate_conv_window_phys mem_usage memory_saver_adapter size",
    ),
    Name(
        POOL,
        "MambaPool.__init__",
        "spec_state_size cache_params mamba_layer_ids device speculative_num_draft_tokens",
    ),
    Name(POOL, "MambaPool._detect_conv_window_axis", "conv_state_shape win_len"),
    Name(
        POOL,
        "MambaPool._allocate_deduplicated_conv_window",
        "conv_shape num_mamba_layers spec_state_size speculative_num_draft_tokens conv_dtype",
    ),
    Name(
        POOL,
        "HybridReqToTokenPool",
        "mamba_pool_cls mamba_pool req_index_to_mamba_index_mapping short_conv_pool ngram_pool",
    ),
    Name(CONFIGURATOR, "KVCacheConfigurator", "mambaish_config dflash_draft_cell_size_per_token"),
    Name(CONFIGURATOR, "KVCacheConfigurator._handle_max_mamba_cache", "total_rest_memory"),
    Name(CONFIGURATOR, "KVCacheConfigurator._profile_available_bytes", "pre_model_load_memory"),
    Name(CONFIGURATOR, "KVCacheConfigurator._calculate_mamba_ratio"),
    Name(DFLASH, "scale_kv_cell_size_per_token_for_dflash", "target_cell_size_per_token"),
    Name("sglang.srt.configs.mamba_utils", "BaseLinearStateParams", "layers dtype mamba_cache_per_req"),
    Name("sglang.srt.configs.mamba_utils", "Mamba2StateShape", "conv temporal conv_kernel num_k_heads_per_tp"),
    Name("sglang.srt.constants", "GPU_MEMORY_TYPE_KV_CACHE"),
    Name(
        MAMBA_COPY,
        "scatter_mamba_states_after_mtp_verify",
        "mamba_caches state_indices_tensor last_correct_step_indices mamba_track_indices mamba_steps_to_track",
    ),
    Name(MAMBA_COPY, "track_mamba_states_all_layers", "cache_indices mamba_track_mask mamba_track_indices batch_size"),
    Name("sglang.srt.layers.attention.hybrid_linear_attn_backend", "HybridLinearAttnBackend", "linear_attn_backend"),
    Name(GDN, "GDNAttnBackend", "kernel_dispatcher forward_metadata _translate_mamba_indices forward_extend"),
    Name(GDN, "GDNAttnBackend.forward_decode", "layer forward_batch mixed_qkv a b"),
    Name(GDN, "GDNKernelDispatcher.target_verify", "A_log dt_bias q k v a b ssm_states cache_indices query_start_loc"),
    Name(GDN, "GDNKernelDispatcher", "verify_kernel"),
    Name(SPEC_UTILS, "SIMULATE_ACC_LEN"),
    Name("sglang.srt.configs.hybrid_arch", "hybrid_gdn_config", "model_config"),
    *(Name(SIZING, f"get_{what}") for what in ("alloc_page_size", "req_to_token_extra_context_len")),
    Name(DFLASH, "validate_dflash_request", "req enable_overlap"),
    Name("sglang.srt.mem_cache.allocator", "BaseTokenToKVPoolAllocator", "page_size"),
    Name("sglang.srt.mem_cache.kv_loc_plan", "KVLocPlan", "bind"),
    Name("sglang.srt.mem_cache.kv_index_translator", "KVIndexTranslator", "bind_and_verify_backends"),
    Name(POOL, "KVWriteLoc", "for_layer"),
    Name(POOL, "ReqToTokenPool", "size max_context_len device enable_memory_saver req_to_token req_generation"),
    Name(POOL, "MHATokenToKVPool", "get_kv_size_bytes k_buffer v_buffer"),
    Name("sglang.srt.mem_cache.swa_memory_pool", "SWAKVPool"),
    # the forward
    Name(GRAPHS, "Backend", "DISABLED"),
    Name(GRAPHS, "CudaGraphConfig", "decode"),
    Name(GRAPHS, "PhaseConfig", "bs"),
    Name(FORWARD_BATCH, "CaptureHiddenMode", "NULL FULL"),
    Name(
        FORWARD_BATCH,
        "ForwardBatch",
        "forward_mode batch_size input_ids req_pool_indices seq_lens seq_lens_sum seq_lens_cpu out_cache_loc positions "
        "spec_algorithm spec_info capture_hidden_mode num_token_non_padded global_num_token_non_padded_cpu "
        "can_run_decode_cuda_graph mrope_positions",
    ),
    Name(FORWARD_BATCH, "ForwardMode", "TARGET_VERIFY is_cpu_graph is_cuda_graph"),
    Name(FORWARD_BATCH, "compute_position", "attn_backend extend_prefix_lens extend_seq_lens extend_seq_lens_sum"),
    Name(FORWARD_BATCH, "enable_num_token_non_padded"),
    Name("sglang.srt.layers.moe.fused_moe_triton.layer", "FusedMoE"),
    Name(FORWARD_CONTEXT, "ForwardContext", "attn_backend"),
    Name(FORWARD_CONTEXT, "forward_context", "ctx forward_batch"),
    Name(
        MODEL_RUNNER,
        "ModelRunner",
        "model model_config sampler attn_backend token_to_kv_pool req_to_token_pool kv_index_translator page_size "
        "device gpu_id forward max_running_requests max_total_num_tokens decode_cuda_graph_runner eager_runner "
        "_get_attention_backend _extend_forward_kwargs prefill_attention_backend_str decode_attention_backend_str "
        "sampling_prewarm_result shared_read_done_event",
    ),
    Name(
        MODEL_RUNNER,
        "ModelRunnerOutput",
        "logits_output can_run_graph expert_distribution_metrics routed_experts_output indexer_topk_output",
    ),
    Name("sglang.srt.model_executor.pool_configurator", "MemoryPoolConfig"),
    Name(
        "sglang.srt.model_executor.runner",
        "DecodeCudaGraphRunner",
        "attn_backend speculative_num_draft_tokens capture_bs",
    ),
    Name(MODEL_RUNNER, "SamplingPrewarmResult", "sampling_input_bytes sampling_headroom_bytes"),
    Name("sglang.srt.sampling.sampling_batch_info", "ProcessorEntry", "processor rows indices"),
    Name(
        "sglang.srt.sampling.sampling_batch_info",
        "SamplingBatchInfo",
        "temperatures top_ps top_ks min_ps sampling_seed custom_params custom_logit_processor grammars grammar_mask "
        "logit_bias acc_additive_penalties acc_scaling_penalties is_all_greedy has_custom_logit_processor "
        "return_sampling_masks return_sampling_support_logprobs sampling_mask_batch_indices "
        "sampling_support_logprobs_capture_indices",
    ),
    # layers of the draft model
    Name("sglang.srt.distributed.parallel_state", "GroupCoordinator", "world_size ranks cpu_group all_gather"),
    Name("sglang.srt.layers.activation", "SiluAndMul"),
    Name("sglang.srt.layers.dp_attention", "get_dp_tp_group"),
    Name("sglang.srt.layers.layernorm", "RMSNorm", "hidden_size eps variance_epsilon"),
    Name("sglang.srt.layers.linear", "MergedColumnParallelLinear", "input_size output_sizes bias"),
    Name(
        "sglang.srt.layers.linear", "QKVParallelLinear", "hidden_size head_size total_num_heads total_num_kv_heads bias"
    ),
    Name("sglang.srt.layers.linear", "RowParallelLinear", "input_size output_size bias"),
    Name("sglang.srt.layers.logits_processor", "LogitsProcessorOutput", "next_token_logits hidden_states"),
    Name("sglang.srt.layers.quantization.unquant", "UnquantizedEmbeddingMethod"),
    Name(RADIX, "AttentionType", "DECODER ENCODER_ONLY"),
    Name(RADIX, "RadixAttention", "num_heads head_dim scaling num_kv_heads layer_id sliding_window_size attn_type"),
    Name("sglang.srt.layers.rotary_embedding", "get_rope", "head_size rotary_dim max_position base rope_scaling"),
    Name("sglang.srt.model_loader.weight_utils", "default_weight_loader", "param loaded_weight"),
    Name(
        "sglang.kernels.ops.attention.table_qk_norm_rope",
        "table_qk_norm_rope_",
        "qkv positions q_weight k_weight cos_sin_cache num_q_heads num_k_heads head_dim eps",
    ),
    Name("sglang.srt.models.minimax_m2", "MiniMaxM2ForCausalLM", "model get_input_embeddings"),
    Name("sglang.srt.models.minimax_m2", "MiniMaxM2ForCausalLM.set_eagle3_layers_to_capture", "layer_ids"),
    Name("sglang.srt.models.utils", "apply_qk_norm", "q k q_norm k_norm head_dim"),
    Name("sglang.srt.utils", "async_h2d", "dtype device"),
    Name("sglang.srt.utils.common", "get_cuda_graph_max_batch_size", "max_batch_size"),
    *(Name("sglang.srt.mem_cache.ple_state_pool", pool, "enabled") for pool in ("ShortConvPool", "NGramPool")),
    Name("sglang.srt.utils", "get_available_gpu_memory", "device gpu_id distributed cpu_group"),
    Name("sglang.srt.utils.async_probe", "sanitize_nan_logits", "logits msg"),
    Name("sglang.srt.utils.hf_transformers_utils", "get_rope_config", "config"),
    # the CPU platform
    Name("sglang.srt.layers.attention.attention_registry", "register_attention_backend", "name"),
    Name(ATTENTION, "AttentionBackend", "init_forward_metadata forward needs_cpu_seq_lens"),
    Name("sglang.srt.platforms.cpu", "CpuDeviceMixin"),
    Name("sglang.srt.platforms.device_mixin", "PlatformEnum", "OOT"),
    Name("sglang.srt.platforms.interface", "PlatformCapabilities"),
    Name(
        "sglang.srt.platforms.interface",
        "SRTPlatform",
        "is_out_of_tree supports_speculative_algorithm supports_speculative_draft_attention_backend "
        "get_default_speculative_draft_attention_backend support_mamba_cache_extra_buffer init_backend post_load_model "
        "get_speculative_cache_locs_fn get_default_attention_backend get_dispatch_key_name",
    ),
)
