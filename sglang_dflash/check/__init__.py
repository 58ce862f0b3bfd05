"""Will DFLASH be served by this plugin? A report before the launch, and one of a server that runs.

    sglang-dflash check                              the installation, in seconds
    sglang-dflash check --model-path ... [flags]     the same, and what SGLang makes of these launch flags
    sglang-dflash check ... --draft-steps 20         besides, whether the draft is accepted, in plain torch
    sglang-dflash check --json ...                   as one JSON document on the last line
    sglang-dflash check --server URL [--json]        a running server: what its steps cost, what it chose
    sglang-dflash check --model ... --gpu-memory ... how many requests a card holds (`capacity.report`)

The first reads SGLang's source. The second runs SGLang's own plugin loading and argument resolution as well, in a
process that may print what it likes, so it sees what a launch would do up to the point where weights load; SGLang takes
15 s of CPU to be imported. Exit status: 0 if everything is as it should be, else 1.
"""
