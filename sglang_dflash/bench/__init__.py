"""The benchmark: what speculation is worth on a person's own model, prompts and machine.

    sglang-dflash bench --help

    prompts.py    what is asked: data sets, a file, or the bundled questions
    arms.py       what is compared: launch flags without speculation, with SGLang's worker, with ours
    presets.py    what pages quote, as one option each; workloads.py: texts by how often drafts are accepted
    engine.py     who answers: a server that runs somewhere; served.py: one that is started; in_torch.py: no server
    server.py     a server as a child process; ports.py, progress.py: where it listens, how its start is shown
    chat.py       one request of the OpenAI API, streamed or not, as an answer with its counts and times
    measure.py    one timed run, and the statistics of several
    compare.py    are the answers the same? gate.py: no result unless they are
    schedule.py   who answers what when: arms take turns
    rows.py       measurements as a document's rows, and their summary
    report.py     the document, and its tables

`tiny.py` has the pair that the package brings, for `launch/`, `prove` and the presets.
"""
