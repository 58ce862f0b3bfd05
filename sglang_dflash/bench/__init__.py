"""Benchmark of speculation on a user's own model, prompts and machine (`sglang-dflash bench --help`).

options.py    command line and presets
prompts.py    prompts from data sets, a file, or the bundled questions
engine.py     interface of an arm: client.py queries a server, served.py starts one, in_torch.py needs none
measure.py    a timed run, and statistics of several
compare.py    comparison of answers, and the gate
schedule.py   turns of the arms
rows.py       measurements as rows of a document, and their summary
report.py     document and tables
"""
