"""GPU emulation on a CPU (rehearsal): a GPU server's code paths, run on a CPU.

`SGLANG_DFLASH_REHEARSE=sm90` (or `sm100`) replaces the CPU platform by this one. SGLang's own graph runners then
capture and replay the target's verify, the draft and every width. SGLang's own attention backends (fa3, fa4,
flashinfer, triton, trtllm_mha) plan and run, and Triton kernels run in Triton's interpreter. The emulation is slow, and
exact.

    pool         memory of captured graphs, by the rules of CUDA's caching allocator
    graph        capture and replay; tape: the recorder
    host         marks of host tensors, and checks of reads on the host
    streams      order between streams; watch: accesses to memory (`,streams`)
    branches     streams inside a captured forward
    overlap      places where SGLang orders streams only on CUDA
    exchange     counts of the elements that ranks exchange in a step
    attention    definition of paged attention, and FlashAttention's entry points
    flashinfer   FlashInfer's compiled modules, for its own Python; trtllm: the kernels of its TensorRT-LLM part
    capability   the GPU that SGLang's attention and FlashInfer see
    seams        places where SGLang names CUDA although another platform runs
    models       layers of single families of targets; qwen: Qwen3.5 and Qwen3-Next as on CUDA
    platform     SGLang's platform interface

Proved: the Python that runs in capture and replay, and its metadata; that nothing captured depends on the host; that a
replay reads what the step wrote; that no tensor outlives its memory; the plans of each backend, page tables, windows,
host plans; the arithmetic of Triton kernels. Not proved: the kernels of FlashAttention, FlashInfer and TensorRT-LLM,
bf16 and fp8, alignment beyond assertions, NCCL, memory sizes, speed.
"""
