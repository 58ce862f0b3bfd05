"""What the probe needs of SGLang beside `host_names.py`. Checked when a probed worker is made."""

from sglang_dflash.host_names import POOL, Name

RUNNERS = "sglang.srt.model_executor"

PROBE = (
    Name(f"{RUNNERS}.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner", "backend capture_bs"),
    Name(f"{RUNNERS}.runner_backend.full_cuda_graph_backend", "FullCudaGraphBackend.replay", "shape_key"),
    Name(POOL, "HybridLinearKVPool", "full_kv_pool"),
)
