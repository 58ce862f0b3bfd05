"""GPU emulation on a CPU (rehearsal): a GPU server's code paths, run on a CPU.

`SGLANG_DFLASH_REHEARSE=sm90` (or another of `capability.GPUS`) selects this platform instead of the CPU platform.
SGLang's own graph runners then capture and replay the draft, and the target's verify at every width. SGLang's own
attention backends (fa3, fa4, flashinfer, triton, trtllm_mha) plan and run. Triton kernels without a torch form run in
Triton's interpreter.

Options follow the GPU, as in `sm90,kernels,streams`. With `kernels` all Triton kernels of this plugin run in the
interpreter too. With `streams` CUDA's streams are emulated. The emulation is exact, but slow.

    pool              memory of captured graphs, with the rules of CUDA's caching allocator
    graph             capture and replay
    tape              recorder of a capture
    cost              limits of a captured forward: reads of each weight, and number of launches
    buffers           memory rule of captured graphs: buffers for the context exist once, not per verify width
    launches          limits of a decode step's launches; a replay is one launch
    host              marks of host tensors, and checks of the host's reads
    streams           streams and events, and the check that accesses to memory are ordered
    watch             recorder of accesses to memory
    branches          streams inside a captured forward
    saver             memory that `/release_memory_occupation` gives back
    operands          tensors that an operation reads and writes
    overlap           replacements where SGLang orders streams only on CUDA
    exchange          number of elements that ranks exchange in a step
    attention         definition of paged attention, and FlashAttention's entry points
    flashinfer        definitions of FlashInfer's compiled modules
    flashinfer_plan   FlashInfer's plans
    flashinfer_seams  installation of these definitions
    trtllm            kernels of FlashInfer's TensorRT-LLM part
    capability        the GPU that SGLang's attention code sees
    seams             replacements where SGLang names CUDA although another platform runs
    models            layers that only some families of targets have
    qwen              CUDA's settings for Qwen3.5 and Qwen3-Next
    platform          SGLang's platform interface

The emulation tests the Python code of capture and replay, the metadata, each backend's plans, page tables and windows,
and the arithmetic of Triton kernels. It checks three properties of a captured forward. The forward does not depend on
the host. A replay reads the values of its own step. No tensor is read after its memory is freed.

Not tested: the kernels of FlashAttention, FlashInfer and TensorRT-LLM, bf16 and fp8, alignment that no assertion
checks, NCCL, memory sizes and speed.
"""
