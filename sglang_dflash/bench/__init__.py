"""Benchmark of speculation on a user's own model, prompts and machine (`sglang-dflash bench --help`).

options.py    the command line and its presets
prompts.py    data sets, a file, or the bundled questions
engine.py     an arm: client.py queries a server, served.py starts one, in_torch.py needs none
measure.py    a timed run, and the statistics of several
compare.py    the comparison of answers, and the gate
schedule.py   the turns of the arms
rows.py       measurements as a document's rows, and their summary
report.py     the document and its tables
"""
