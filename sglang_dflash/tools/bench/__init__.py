"""Benchmark of speculation on a user's own model, prompts and machine (`sglang-dflash bench --help`).

An arm is one of the compared systems: a server, or a model in this process.

options.py    command line and presets
prompts.py    prompts from data sets, a file, or the bundled questions
engine.py     interface of an arm: client.py queries a server, served.py starts one, in_torch.py needs none
measure.py    a timed run, and statistics of several runs
compare.py    comparison of answers, and the gate: `--require-equal` shows no speed if answers differ (see `--tie-gap`)
schedule.py   order in which the arms are measured, each in several turns
rows.py       results as rows of the document, and their summary
report.py     JSON document and tables
"""
