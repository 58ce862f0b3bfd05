"""Benchmark options: refused values, sets of prompts, and the launch flags of the arms (the compared servers)."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_dflash.pairs.servers import arms
from sglang_dflash.pairs.tiny import workloads
from sglang_dflash.pairs.tiny.corpus import is_held_out
from sglang_dflash.pairs.tiny.workloads import asked
from sglang_dflash.tools.bench import prompts
from sglang_dflash.tools.bench.engine import Sampling, TokenIds
from sglang_dflash.tools.bench.options import parse
from sglang_dflash.tools.bench.prompts import Task, complete, is_complete
from sglang_dflash.tools.bench.schedule import sampling_of

URL = ("--base-url", "http://127.0.0.1:30000")
DFLASH = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "draft")
SERVED = ("--", "--model-path", "x", *DFLASH)
TORCH = ("--backend", "transformers", "--model", "x", "--draft-model", "y")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Parse bad options and return the last line of the error."""
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "found no server to measure; give one of --base-url, --serve, --preset, --backend transformers"),
        ((*URL, "--serve"), "--base-url and --serve; give one of"),
        (("--base-url", "off"), "--base-url off is no [NAME=]URL"),
        ((*URL, "http://127.0.0.1:1"), "with several servers write NAME=URL for each"),
        (("--base-url", "http://127.0.0.1:PORT"), "--base-url http://127.0.0.1:PORT is no valid URL; write it like"),
        ((*URL, "--output", "."), "--output . is a folder; give a path such as bench"),
        (("--serve", *SERVED, "--api-key", "k"), "--serve sends no API key to the servers that it starts; drop"),
        (("--serve", *SERVED, "--log-level", "warning"), "--log-level warning hides the log line that names the wor"),
        ((*URL, "--api", "k"), "unrecognized arguments: --api"),
        (("--base-url", "=http://x", "=http://y"), "--base-url =http://x is no [NAME=]URL"),
        (("--base-url", "a=http://x", "a=http://y"), "two arms are called a; give each"),
        ((*URL, "--", "--tp", "2"), "-- --tp ...: --base-url takes no server flags; drop them, or use --serve"),
        ((*URL, "--temperature", "-1"), "--temperature: '-1' is not a number of 0 or more"),
        ((*URL, "--concurrency", "1,0"), "'0' is not a whole number above 0"),
        ((*URL, "--plot", "a.gif"), "--plot a.gif has no suffix of a picture; end it with one of .png, .svg, .pdf"),
        ((*URL, "--port", "70000"), "--port: '70000' is no port; give a number from 1 to 65535"),
        ((*URL, "--dataset", "gsm9k"), "invalid choice: 'gsm9k'"),
        ((*URL, "--data", "/nowhere.jsonl"), "--data /nowhere.jsonl is no file"),
        (("--serve",), "the flags after -- have no --model-path; add it"),
        (("--serve", "--dataset", "gsm8k"), "the flags after -- have no --model-path; add it"),
        (("--serve", "--", "--model-path", "x"), "have no --speculative-algorithm DFLASH"),
        (("--serve", "--", "--model-path", "/nowhere/x", *DFLASH), "/nowhere/x is no directory; give a directory, or"),
        (("--serve", "--backend", "vllm", "--", *DFLASH), "--serve starts SGLang, not vllm"),
        (("--serve", "--model", "x", "--", *DFLASH), "--serve takes no --model; drop it, and write --model-path"),
        ((*URL, "--arms", "off"), "drop --arms, or use --serve instead of --base-url"),
        ((*TORCH, "--arms", "off"), "drop --arms, or use --serve instead of --backend transformers"),
        (("--serve", "--arms", "theirs", *SERVED), "there is no arm 'theirs'; use off, mtp"),
        (("--serve", "--arms", "ours:x", *SERVED), "'x' does not begin with VAR=VALUE; write NAME:VAR=V"),
        (
            ("--serve", "--arms", "ours:A=/a/x", "ours:A=/b/x", *SERVED),
            "the same name once paths are shortened (ours:A=x, ours:A=x)",
        ),
        (("--serve", "--arms", "ours:PYTHONPATH=/x", *SERVED), "an arm may not set PYTHONPATH"),
        ((*URL, "--preset", "readme"), "found --base-url and --preset readme; give one of"),
        (("--preset", "widths", "--concurrency", "1,32"), "--concurrency 32: the servers of --preset widths run 16"),
        ((*URL, "--require-equal", "--temperature", "1"), "--require-equal (also of --preset) needs greedy answers"),
        ((*URL, "--tie-gap", "1"), "--tie-gap needs --require-equal"),
        ((*URL, "--draft-model", "x"), "--draft-model needs --backend transformers"),
        (("--backend", "transformers", "--model", "x"), "needs --model and --draft-model"),
        ((*TORCH, "--concurrency", "8"), "runs one request at a time"),
    ],
)
def test_bad_options_are_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in refused(capsys, *arguments)


def test_defaults_are_those_of_the_model_cards():
    options = parse(URL)
    assert options.concurrency == [1, 8, 16, 32]
    assert (options.max_new_tokens, options.temperature, options.enable_thinking) == (4096, 0.0, False)
    assert [(task.name, len(task.prompts)) for task in options.tasks] == [("synthetic", 128)]
    assert parse([*URL, "--concurrency", "1", "4,8", "1"]).concurrency == [1, 4, 8]
    assert parse([*URL, "--output", "qwen3.5.json"]).output == Path("qwen3.5")
    assert parse([*URL, "--output", "qwen3.5"]).output == Path("qwen3.5")


def test_explicit_options_override_a_preset():
    options = parse(["--preset", "readme"])
    assert [one.name for one in options.launches] == ["off", "stock", "ours"]
    assert (options.concurrency, options.repeats, options.one_at_a_time) == ([1, 8], 5, False)
    assert (options.require_equal, options.latency, options.enable_thinking) == (True, False, True)
    assert all(one.env["CUDA_VISIBLE_DEVICES"] == "" for one in options.launches)
    options = parse(["--preset", "readme", "--no-require-equal", "--latency", "--no-enable-thinking"])
    assert (options.require_equal, options.latency, options.enable_thinking) == (False, True, False)
    typed = "--repeats=2 --concurrency 4 --arms off ours:A=b --dataset hard --no-enable-thinking"
    options = parse(["--preset", "widths", *typed.split()])
    assert [one.name for one in options.launches] == ["off", "ours:A=b"]
    assert (options.concurrency, options.repeats, options.enable_thinking) == ([4], 2, False)
    assert [(task.name, len(task.prompts)) for task in options.tasks] == [("hard", 16)]


def test_a_preset_may_serve_another_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    options = parse(["--preset", "readme", "--concurrency", "64", "--", "--model-path", str(tmp_path), *DFLASH])
    assert [one.env for one in options.launches] == [
        {}, {"SGLANG_DFLASH_WORKER": "stock"}, {"SGLANG_DFLASH_WORKER": "plugin"},
    ]  # fmt: skip
    assert options.one_at_a_time


def test_torchrun_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "WORLD_SIZE is 8, as torchrun sets it" in refused(capsys, *TORCH)


def test_bundled_questions_are_held_out_and_different():
    questions = [conversation[0]["content"] for conversation in workloads.held_out(16)]
    assert len(set(questions)) == 16
    assert all(map(is_held_out, questions))
    assert workloads.held_out(16) == workloads.held_out(16)


def test_a_file_holds_prompts_or_chats(tmp_path):
    data = tmp_path / "mine.jsonl"
    system = {"role": "system", "content": "Be brief."}
    rows = [{"prompt": "one"}, {"messages": [system, *asked("two")]}, {"prompt": "three"}]
    data.write_text("\n\n".join(map(json.dumps, rows)))
    assert prompts.read(data, 2) == Task("mine", "mine.jsonl", [asked("one"), [system, *asked("two")]])


def test_a_file_may_hold_token_ids(tmp_path):
    data = tmp_path / "ids.jsonl"
    data.write_text('{"input_ids": [5, 6]}\n{"prompt": "one"}\n')
    task = prompts.read(data, 2)
    assert task.prompts == [TokenIds([5, 6]), asked("one")]
    assert is_complete(task)
    assert isinstance(task.prompts[0], TokenIds)
    body = Sampling(max_new_tokens=8, ignore_eos=True).body("m", task.prompts[0])
    assert (body["input_ids"], body["ignore_eos"]) == ((5, 6), True)
    assert not {"input_ids", "ignore_eos"} & set(Sampling(max_new_tokens=8).body("m", task.prompts[1]))


def test_a_prompt_may_be_the_turns_of_a_user(tmp_path):
    data = tmp_path / "turns.jsonl"
    data.write_text('{"prompt": ["First.", "Then."]}\n')
    assert prompts.read(data, 1).prompts == [asked("First.", "Then.")]
    for wrong in ("null", "[]", '["a", 1]', "5"):
        data.write_text(f'{{"prompt": {wrong}}}\n')
        with pytest.raises(ValueError, match=r"turns\.jsonl:1: found .*; write one JSON object per line, with"):
            prompts.read(data, 1)


def test_what_would_be_left_out_of_a_request_is_refused(tmp_path):
    data = tmp_path / "tools.jsonl"
    for more in ({"tools": []}, {"messages": [{"role": "user", "content": "a", "tool_calls": []}]}):
        data.write_text(json.dumps({"messages": asked("one")} | more))
        with pytest.raises(ValueError, match=r"tools\.jsonl:1: bench does not send 'tool(s|_calls)'; take it out"):
            prompts.read(data, 1)


def test_repeating_conversations_include_earlier_answers():
    task = prompts.load("repeating", 8)
    assert not prompts.is_complete(task)
    asked = prompts.complete(task, lambda prompts: [f"answer {len(prompt)}" for prompt in prompts]).prompts
    assert [len(prompt) for prompt in asked] == [1, 3, 5, 7] * 2
    assert [message["content"] for message in asked[2][1::2]] == ["answer 1", "answer 3"]
    assert len({message["content"] for message in asked[3][::2]}) == 1
    assert asked[0] != asked[4]


def test_hopeless_answers_are_short_and_ignore_the_end_token():
    task = prompts.load("hopeless", 3)
    assert [len(prompt) for prompt in task.prompts] == [32] * 3
    assert sampling_of(task, Sampling(max_new_tokens=128)) == Sampling(max_new_tokens=48, ignore_eos=True)
    assert sampling_of(prompts.load("hard", 3), Sampling(max_new_tokens=128)) == Sampling(max_new_tokens=128)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "holds no line"),
        ("not json", "mine.jsonl:1: found 'not json'; write one JSON object per line"),
        ('{"question": "two"}', "mine.jsonl:1: found .*question.*; write one JSON object per line"),
        ('{"messages": [{"role": "user"}]}', "mine.jsonl:1: found .*; write one JSON object per line"),
        ('{"input_ids": []}', "is no list of token ids"),
        ('{"input_ids": [1, true]}', "is no list of token ids"),
        ('{"input_ids": "12"}', "is no list of token ids"),
        ('{"messages": []}', '"messages" is empty; end it with the user'),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "has the role 'assistant'; end with the user's"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "has the role 'tool'; end with the user's message"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    data = tmp_path / "mine.jsonl"
    data.write_text(line)
    with pytest.raises(ValueError, match=message):
        prompts.read(data, 5)


ROWS = {
    "gsm8k": ({"question": "1 + 1?"}, "1 + 1?\nPlease reason"),
    "math500": ({"problem": "x?"}, "x?\nPlease reason"),
    "humaneval": ({"prompt": "def f():"}, "Write a solution"),
    "mbpp": ({"prompt": "Sort.", "test_list": ["assert 1", "assert 2"]}, "Sort.\nYour code should pass"),
    "mt-bench": ({"prompt": ["First.", "Then."]}, "First."),
    "alpaca": ({"instruction": "Translate.", "input": "Haus"}, "Translate.\n\nHaus"),
}  # fmt: skip


@pytest.mark.parametrize("name", prompts.DATA_SETS)
def test_rows_of_published_sets_become_questions(name, monkeypatch):
    row, begins = ROWS[name]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: [row] * 3))
    task = prompts.load(name, 128)
    assert len(task.prompts) == 3  # all rows, because the set has fewer than 128
    assert task.prompts[0][0]["content"].startswith(begins)


@pytest.mark.parametrize("absent", [True, False], ids=["not installed", "no network"])
def test_an_unavailable_set_names_alternatives(monkeypatch, absent):
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", None if absent else SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"GSM8K .*use --data FILE.jsonl, or the bundled --dataset synthetic"):
        prompts.load("gsm8k", 1)


def test_a_second_turn_follows_the_first_arms_answer():
    task = Task("mt", "", [asked("First.", "Then."), asked("Only.")])
    assert not is_complete(task)
    done = complete(task, lambda prompts: [f"<think>hm</think>\n{prompt[-1]['content']}!" for prompt in prompts])
    second = [*asked("First."), {"role": "assistant", "content": "First.!"}, *asked("Then.")]
    assert done.prompts == [asked("First."), second, asked("Only.")]
    assert is_complete(done)


def test_arms_differ_only_in_speculation_flags():
    flags = ["--model-path", "m", *DFLASH, "--tp", "2", "--speculative-num-draft-tokens=8", "--trust-remote-code"]
    shared = ["--model-path", "m", "--tp", "2", "--trust-remote-code"]
    off, mtp, stock, ours = (arms.launch(name, flags, mtp_steps=3) for name in arms.ARMS)
    n = len(arms.SERVE)
    assert list(off.command[n:]) == shared
    assert list(mtp.command[n:]) == [*shared, *arms.mtp_flags(3)]
    assert list(stock.command[n:]) == list(ours.command[n:]) == flags
    assert (stock.env, ours.env) == ({"SGLANG_DFLASH_WORKER": "stock"}, {"SGLANG_DFLASH_WORKER": "plugin"})
    assert [one.ours for one in (off, mtp, stock, ours)] == [False, False, False, True]


def test_commas_separate_variables_only_before_a_name():
    assert arms.environment_of("ours:SGLANG_DFLASH_WIDTHS=1,8,16,B=x=y,C=") == {
        "SGLANG_DFLASH_WIDTHS": "1,8,16", "B": "x=y", "C": "",
    }  # fmt: skip
    assert arms.environment_of("ours") == {}
    stock = arms.launch("stock:SGLANG_DFLASH_WORKER=plugin,A=1", DFLASH, mtp_steps=3, env={"A": "0", "B": "0"})
    assert stock.env == {"SGLANG_DFLASH_WORKER": "plugin", "A": "1", "B": "0"}


@pytest.mark.parametrize(
    ("config", "n_layers"),
    [
        ({}, 0),
        ({"num_nextn_predict_layers": 1}, 1),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, 1),
        ({"text_config": None}, 0),
    ],
)
def test_mtp_is_an_arm_only_for_models_with_mtp(tmp_path, config, n_layers):
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--model-path", str(tmp_path), *DFLASH]
    names = [one.name for one in arms.launches((), flags, mtp_steps=3)]
    assert names == (["off", "mtp", "stock", "ours"] if n_layers else ["off", "stock", "ours"])
    if not n_layers:
        with pytest.raises(ValueError, match=r"--arms mtp: .* has no MTP layers"):
            arms.launches(["off", "mtp"], flags, mtp_steps=3)
