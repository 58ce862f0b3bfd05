"""What `--enable-metrics` needs of SGLang beside `host_names.py`. Checked where metrics are reported."""

from sglang_dflash.host_names import BATCH, POOL, Name

COMPONENTS = "sglang.srt.managers.scheduler_components"
REPORTER = f"{COMPONENTS}.metrics_reporter"
COLLECTOR = "sglang.srt.observability.metrics_collector"

METRICS = (
    Name(
        REPORTER,
        "SchedulerMetricsReporter",
        "__post_init__ _maybe_log_idle_metrics scheduler metrics_collector current_scheduler_metrics_enabled",
    ),
    Name(COLLECTOR, "SchedulerMetricsCollector", "labels _counter_cls _gauge_cls _histogram_cls"),
    Name(
        f"{COMPONENTS}.batch_result_processor",
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "result batch",
    ),
    Name(BATCH, "ReqKvInfo", "req_pool_idx kv_committed_len"),
    Name(POOL, "ReqToTokenPool.available_size"),
    Name(f"{COMPONENTS}.pool_stats_observer", "SchedulerPoolStatsObserver", "get_pool_stats"),
    Name(f"{COMPONENTS}.pool_stats_observer", "PoolStats", "mamba_num_used"),
)
