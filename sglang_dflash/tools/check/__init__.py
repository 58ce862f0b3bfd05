"""Report on an installation, a launch, a running server, or the requests that a card holds.

    sglang-dflash check                              the installation, in seconds
    sglang-dflash check --model-path ... [flags]     the same, and these launch flags as SGLang resolves them
    sglang-dflash check ... --draft-steps 20         in addition, whether the draft is accepted, in PyTorch
    sglang-dflash check ... --draft-steps 20 --data FILE     the same with your own prompts
    sglang-dflash check --json ...                   one JSON document on the last line
    sglang-dflash check --server URL [--json]        a running server: times of its steps, and the chosen widths
    sglang-dflash check --model ... --gpu-memory ... the number of requests that a card holds

The first form reads SGLang's source. The second also runs SGLang's plugin loading and argument resolution in a separate
process, up to the point where weights load. Importing SGLang takes 15 s of CPU.
Exit status: 0 if everything is as it should be, else 1, or 2 for a wrong value of an option.
"""
