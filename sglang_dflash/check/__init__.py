"""Will DFLASH be served by this plugin? A report before the launch, and one of a server that runs.

    sglang-dflash check                              the installation
    sglang-dflash check --model-path ... [flags]     the same, and a launch with these flags
    sglang-dflash check --json ...                   as one JSON document on the last line
    sglang-dflash check --server URL [--json]        a running server: what its steps cost, what it chose
    sglang-dflash check --model ... --gpu-memory ... how many requests a card holds (`capacity.report`)

The first two run SGLang's own plugin loading and argument resolution, in a process of their own that may print what it
likes, so they see what a launch would do up to the point where weights load. Exit status: 0 if everything is as it
should be, else 1.
"""
