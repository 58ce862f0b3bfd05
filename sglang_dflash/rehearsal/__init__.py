"""The rehearsal: what a GPU's server runs, run on a CPU.

`SGLANG_DFLASH_REHEARSE=sm90` (or `sm100`) puts this platform in the CPU platform's place. SGLang's own graph runners
then capture and replay the target's verify, the draft and every width, SGLang's own attention backends (fa3, fa4,
flashinfer, triton, trtllm_mha) plan and run, and Triton kernels run in Triton's interpreter. Slow, and exact.

    pool         the memory of captured graphs, by the rules of CUDA's caching allocator
    graph        capture and replay, of what tape takes down
    host         which tensors are the host's, and who may read them
    streams      which stream may still be writing what another reads; watch: what touches which memory (`,streams`)
    branches     streams inside of a captured forward
    overlap      where SGLang orders streams on CUDA alone
    exchange     counts what ranks hand one another in a step
    attention    what paged attention computes, and FlashAttention's entry points
    flashinfer   FlashInfer's compiled modules, under its own Python; trtllm: the kernels behind its TensorRT-LLM part
    capability   which GPU SGLang's attention and FlashInfer are told of
    seams        where SGLang names CUDA although another platform runs, each with its reason
    models       layers of single families of targets; qwen: Qwen3.5 and Qwen3-Next as CUDA has them
    platform     what SGLang asks

What is proved: which Python runs in capture and replay, and that its metadata is right; that nothing captured depends
on the host; that a replay reads what the step wrote; that nothing outlives the memory it lies in; what each backend
plans, page tables, windows, host plans; the arithmetic of Triton kernels. What is not: the kernels of FlashAttention,
FlashInfer and TensorRT-LLM themselves, bf16 and fp8, alignment beyond what is asserted, NCCL, memory sizes, speed.
"""
