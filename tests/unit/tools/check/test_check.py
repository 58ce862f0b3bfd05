"""`sglang-dflash check` before a launch: the lines it prints, its exit status, and the profiles in env/."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from sglang_dflash import flags
from sglang_dflash.engine.host.backends import Needs, resolve
from sglang_dflash.engine.host.names import Name
from sglang_dflash.flags import Worker
from sglang_dflash.tools.check import findings
from sglang_dflash.tools.check.__main__ import main
from sglang_dflash.tools.check.findings import Finding, installation

ENV = Path(__file__).parents[4] / "env"
CPU = (
    "--model-path {target} --device cpu --attention-backend torch_native --speculative-algorithm DFLASH "
    "--speculative-draft-model-path {draft} --max-total-tokens 1024 --port 31071"
)


def asked(launch: Any, *argv: str, env: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Run `check.launch` in a child process, which imports SGLang, and return its findings by name."""
    ended = launch("sglang_dflash.tools.check.launch", *argv, env=env, timeout_s=300)
    assert ended.code == 0, ended.err
    return {finding["name"]: finding for finding in json.loads(ended.out.splitlines()[-1])}


def test_a_misspelt_flag_of_sglang_gets_the_nearest_one(launch):
    found = asked(launch, "--model-path", "x", "--speculative-algoritm", "DFLASH")["launch"]
    assert not found["ok"]
    assert found["text"] == "SGLang has no flag --speculative-algoritm; did you mean --speculative-algorithm?"


def test_a_good_installation_and_launch(launch, pair):
    found = asked(launch, *CPU.format(target=pair["hybrid"], draft=pair["draft"]).split())
    assert all(finding["ok"] for finding in found.values()), found
    assert found["plugin"]["text"] == "sglang-dflash's worker serves DFLASH"
    assert found["platform"]["text"] == "CpuPlatform, device cpu"
    facts = found["launch"]["text"].split(", ")
    assert facts[0] == "block 8"
    assert facts[1].startswith("verify widths 1/")
    assert facts[2:] == [
        "n-gram copies auto",
        "draft window off",
        "draft attention backend torch_native",
        f"draft {pair['draft']}",
    ]
    assert "block_size=8" in found["launch"]["detail"]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


class Served(NamedTuple):
    """Expected text of the finding `launch`, changes to the draft, further flags, target, and whether it passes."""

    text: str
    draft: dict[str, Any] = {}  # noqa: RUF012
    flags: tuple[str, ...] = ()
    target: str = "dense"
    ok: bool = True


def overrides(**fields: Any) -> tuple[str, ...]:
    return "--json-model-override-args", json.dumps(fields)


SERVED = {
    "another rope of the target": Served("'rope_type': 'default'", flags=overrides(rope_parameters=YARN)),
    "another rope of the target, older name": Served("'rope_type': 'default'", flags=overrides(rope_scaling=YARN)),
    "another architecture of the target": Served("block 8", flags=overrides(architectures=["Qwen3ForCausalLM"])),
    "an override of a missing field": Served(
        "this model cannot be read with these flags ('",
        flags=overrides(text_config={"rope_scaling": YARN}),
        ok=False,
    ),
    "an override that is not JSON": Served(
        "'{rope: 1}' is not JSON (Expecting property name",
        flags=("--json-model-override-args", "{rope: 1}"),
        ok=False,
    ),
    "a flag that SGLang refuses after it has resolved all": Served(
        "served_model_name cannot contain a colon", flags=("--served-model-name", "model:1"), ok=False
    ),
    "fewer positions": Served("was trained for 64 positions and serves 512", {"max_position_embeddings": 64}),
    "a padded vocabulary": Served("has vocab_size 100 and uses the target's embedding and head", {"vocab_size": 100}),
    "a target in float16": Served("has dtype bfloat16 and is loaded in float16, the target's dtype", target="fp16"),
    "a target without weights": Served(
        "--load-format dummy applies only to the target: the draft is loaded from", flags=("--load-format", "dummy")
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_draft_is_read_from_its_own_config(name, launch, pair, checkpoints, tmp_path):
    case = SERVED[name]
    draft = str(checkpoints.write_draft(tmp_path, **case.draft))
    found = asked(launch, *CPU.format(target=pair[case.target], draft=draft).split(), *case.flags)["launch"]
    assert (found["ok"], case.text in found["text"] + found["detail"]) == (case.ok, True), found


def test_a_bad_launch_is_one_failing_line(launch, pair):
    line = CPU.format(target=pair["dense"], draft=pair["draft"]) + " --speculative-num-draft-tokens 64"
    found = asked(launch, *line.split())
    assert [name for name, finding in found.items() if not finding["ok"]] == ["launch"]
    assert found["launch"]["text"].startswith("block size 64 is not within 2..32")


def test_a_taken_port_is_reported(launch, pair):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        found = asked(launch, *CPU.format(target=pair["dense"], draft=pair["draft"]).split(), "--port", port)["launch"]
    assert (found["ok"], found["text"].split(";")[0]) == (
        False,
        f"--port {port} of 127.0.0.1 is in use by another process",
    )


def test_impossible_widths_are_reported(launch, pair):
    line = CPU.format(target=pair["mamba2"], draft=pair["draft"]).split()
    found = asked(launch, *line, env={"SGLANG_DFLASH_WIDTHS": "4"})["launch"]
    assert not found["ok"]
    reason = "SGLang locates the recurrent states of this target by the block size"
    sentence = f"SGLANG_DFLASH_WIDTHS=4: this server verifies only whole blocks ({reason}); set the variable to 8"
    assert found["text"] == f"{sentence}, or unset it"
    ranks = "--tp-size 2 --dp-size 2 --enable-dp-attention --enable-dp-lm-head"
    for asks in (line, [*CPU.format(target=pair["hybrid"], draft=pair["draft"]).split(), *ranks.split()]):
        found = asked(launch, *asks)["launch"]
        assert found["ok"], found
        assert "widths=(8,)" in found["detail"]


def test_an_excluded_plugin_is_reported(launch):
    plugin = asked(launch, env={"SGLANG_PLUGINS": "another"})["plugin"]
    assert not plugin["ok"]
    assert "if SGLANG_PLUGINS is set, add sglang_dflash to it" in plugin["text"]


def test_the_stock_worker_is_named(launch):
    plugin = asked(launch, env={"SGLANG_PLUGINS": "another", "SGLANG_DFLASH_WORKER": "stock"})["plugin"]
    assert plugin["ok"]
    assert plugin["text"] == "SGLANG_DFLASH_WORKER=stock: SGLang's built-in worker serves DFLASH"


def test_flags_without_dflash_are_reported(launch, pair):
    line = f"--model-path {pair['dense']} --device cpu --attention-backend torch_native --max-total-tokens 1024"
    found = asked(launch, *line.split())["launch"]
    assert not found["ok"]
    assert "--speculative-algorithm is missing; set it to DFLASH" in found["text"]


def test_installation_findings_need_no_sglang(monkeypatch):
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "ours")
    found = {finding.name: finding for finding in installation()}
    assert "sglang 0.5.23" in found["versions"].text
    assert found["entry points"].ok
    assert not found["environment"].ok
    assert found["environment"].text.startswith("SGLANG_DFLASH_WORKER='ours' is not one of")


@pytest.mark.parametrize(
    ("variable", "cure", "right"),
    [
        ("SGLANG_PLUGINS", r"add sglang_dflash to it \(without a GPU also sglang_dflash_cpu", "another, sglang_dflash"),
        ("SGLANG_PLATFORM", "unset it, or set SGLANG_DFLASH_WORKER=stock$", "sglang_dflash_cpu"),
    ],
)
def test_an_environment_that_excludes_the_plugin_is_reported(variable, cure, right, monkeypatch):
    for wrong in ("another", "another, sglang_dflash_cpu"):
        monkeypatch.setenv(variable, wrong)
        with pytest.raises(ValueError, match=f"{variable}={wrong} stops SGLang from loading sglang-dflash; {cure}"):
            findings.environment()
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "stock")
    assert findings.environment().startswith("worker stock")
    monkeypatch.delenv("SGLANG_DFLASH_WORKER")
    monkeypatch.setenv(variable, right)
    assert findings.environment().startswith("worker plugin")


def test_another_version_of_sglang_is_reported(monkeypatch):
    monkeypatch.setattr(findings.source, "version", lambda: "0.5.24")
    with pytest.raises(
        RuntimeError, match=r"^sglang 0\.5\.24 is installed; install the unmodified release sglang 0\.5\.23"
    ):
        findings.contract()
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "stock")
    assert findings.contract() == "sglang 0.5.24 is installed; only SGLang's own worker can serve DFLASH"


def test_missing_names_of_sglang_are_reported(monkeypatch):
    lacked = Name("sglang.srt.utils", "async_h2h")
    monkeypatch.setitem(findings.SECTIONS, "served", (*findings.SECTIONS["served"], lacked))
    found = {finding.name: finding for finding in installation()}["host contract"]
    assert found == Finding(
        "host contract",
        False,
        "sglang.srt.utils has no async_h2h; install the unmodified release sglang 0.5.23, or set "
        "SGLANG_DFLASH_WORKER=stock",
    )


class Child(NamedTuple):
    """Result of `subprocess.run` for the child process that imports SGLang."""

    returncode: int
    stdout: str
    stderr: str


FLAGS = ["--model-path", "here", "--speculative-algorithm", "DFLASH"]
ANSWERED = Child(0, f"SGLang says hello\n{json.dumps([vars(Finding('plugin', True, 'ours'))])}\n", "a warning\n")
LAUNCHED = Child(0, json.dumps([vars(Finding("launch", True, "block 8"))]), "")
ENDED = Child(2, "", "usage: ...\nlaunch_server: error: unrecognized arguments: --speculativ\n")


@pytest.mark.parametrize(
    ("child", "argv", "code", "last"),
    [
        (ANSWERED, FLAGS, 0, "ok    plugin         ours"),
        (ENDED, ["--speculativ"], 1, "FAIL  launch         launch_server: error: unrecognized arguments: --speculativ"),
        (
            Child(-9, "", ""),
            FLAGS,
            1,
            "FAIL  launch         the system killed SGLang, most often because memory ran out; free memory",
        ),
        (
            Child(3, "", ""),
            FLAGS,
            1,
            "FAIL  launch         SGLang ended with status 3 and printed nothing; start `python -m "
            "sglang.launch_server` with these flags for its log",
        ),
    ],
)
def test_the_report_omits_sglangs_output(child, argv, code, last, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: child)
    assert main(argv) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:4]] == ["versions", "environment", "entry", "host"]
    assert lines[4:] == [last]
    assert main([*argv, "--json"]) == code
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["ok"] is (code == 0)


def test_a_pairing_that_was_not_tested_is_named(monkeypatch, capsys):
    """A draft of the same sizes, trained for another target, passes all other checks."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: LAUNCHED)
    assert main(FLAGS) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("note  pairing        not tested: whether this draft belongs to this target; --draft-steps")
    monkeypatch.setattr("sglang_dflash.tools.check.__main__.draft_steps", lambda *_: [Finding("draft steps", True, "")])
    assert main([*FLAGS, "--draft-steps", "20"]) == 0
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--model", "qwen3.5-27b"],
            "have no --speculative-algorithm DFLASH; add it for a launch, or add --gpu-memory",
        ),
        (
            ["--model", "Qwen3.5-27B", "--tp", "2"],
            "have no --speculative-algorithm DFLASH; add it for a launch, or add",
        ),
        (["--model-path=/a/folder", "--device", "cpu"], "have no --speculative-algorithm DFLASH"),
        (["Qwen3-8B"], "Qwen3-8B stands without an option; did you mean --model Qwen3-8B --gpu-memory GIB?"),
        (["http://127.0.0.1:30000"], "did you mean --server http://127.0.0.1:30000?"),
        (["--model", "x", "--gpu-memry=80"], "there is no option --gpu-memry; did you mean --gpu-memory?"),
        (["--drafts-steps", "20", "--model", "x"], "did you mean --draft-steps?"),
        (["--draft-steps", "20", "--config=a.yaml"], "--draft-steps does not read --config; give the paths of both mo"),
        (["--model-path", "x", "--data", "a.jsonl"], "--data has an effect only with --draft-steps; add --draft-steps"),
        (["--draft-steps", "20", "--model", "x", "--gpu-memory", "80"], "--draft-steps does not go with --gpu-memory"),
        (["Qwen/X", "--speculative-algorithm", "DFLASH"], "did you mean --model-path Qwen/X?"),
    ],
)
def test_a_question_that_sglang_cannot_answer_does_not_start_it(argv, sentence, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", None)
    assert main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_help_has_the_options_of_every_form(capsys):
    for argv in (["--help"], ["--model-path", "x", "-h"]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert out.startswith("usage: sglang-dflash check")
        assert all(option in out for option in ("--draft-steps", "--server", "--gpu-memory", "--mem-fraction-static"))


@pytest.mark.parametrize(
    ("width", "end"), [("0", "from the variable$"), ("40", "from the variable, or add the launch")]
)
def test_a_width_out_of_range_is_noticed_without_a_launch(width, end, monkeypatch):
    monkeypatch.setenv("SGLANG_DFLASH_WIDTHS", f"8,{width}")
    with pytest.raises(
        ValueError, match=rf"^SGLANG_DFLASH_WIDTHS: {width} is not within 1\.\.32; remove this number {end}"
    ):
        findings.environment()
    assert findings.environment(launch=True).startswith("worker plugin")


def test_a_whole_command_is_refused(capsys):
    for words in (["python", "-m", "sglang.launch_server"], ["sglang", "serve"]):
        assert main([*words, "--model-path", "m", "--speculative-algorithm", "DFLASH"]) == 1
        assert "found a whole command; give only the flags after" in capsys.readouterr().err


def test_the_only_width_is_not_removed(monkeypatch):
    monkeypatch.setenv("SGLANG_DFLASH_WIDTHS", "0")
    with pytest.raises(ValueError, match=r"^SGLANG_DFLASH_WIDTHS: 0 is not within 1\.\.32; unset the variable$"):
        findings.environment()


def test_the_report_of_an_installation_imports_no_sglang():
    """Importing SGLang takes 15 s and importing torch 2 s, so this report must import neither."""
    program = (
        "import sys; from sglang_dflash.tools.check.__main__ import main; status = main([]); "
        "sys.exit(status or repr({'sglang', 'torch'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert ended.stderr == "set()\n"
    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["ok"] * 4


@pytest.mark.full
def test_the_whole_report_as_a_command(pair):
    flags = CPU.format(target=pair["hybrid"], draft=pair["draft"]).split()
    command = [sys.executable, "-m", "sglang_dflash.tools.check", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["ok"] * 7 + ["note"]


def source(profile: Path) -> dict[str, str]:
    """Return the environment after sourcing a profile."""
    command = f"set -eu; source {shlex.quote(str(profile))}; env -0"
    out = subprocess.run(["bash", "-c", command], env={"PATH": os.environ["PATH"]}, capture_output=True, check=True)
    return dict(line.split("=", 1) for line in out.stdout.decode().split("\0") if line)


@pytest.mark.parametrize("profile", sorted(ENV.glob("*.sh")), ids=lambda path: path.stem)
def test_profiles_set_flags_that_exist(profile):
    expected = Worker.STOCK if profile.stem == "stock" else Worker.PLUGIN
    assert flags.read(source(profile)).worker is expected
    assert f"| `{profile.name}` |" in (ENV / "README.md").read_text()


@pytest.mark.parametrize(
    ("profile", "device", "backend"),
    [("cpu", "cpu", "torch_native"), ("hopper", "sm90", "fa3"), ("blackwell", "sm100", "fa4")],
)
def test_a_profiles_backends_can_run_the_draft(profile, device, backend):
    given = source(ENV / f"{profile}.sh")["DFLASH_FLAGS"].split()
    named = dict(zip(given[::2], given[1::2], strict=True))
    chosen = resolve(
        asked=named.get("--speculative-draft-attention-backend"),
        target=named["--attention-backend"],
        needs=Needs(whole_blocks=True, device=device, page_size=64),
    )
    assert chosen == backend


def test_import_errors_and_conflicting_entry_points_are_findings(monkeypatch):
    def entry_points(group: str) -> list[Any]:
        name, ours = findings.ENTRY_POINTS[group]
        return [SimpleNamespace(name=name, value=value) for value in (ours, "another.package:register")]

    def import_more() -> str:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(findings, "entry_points", entry_points)
    found = findings.find({"kernels": import_more, "entry points": findings.found_by_sglang})
    assert found[0] == Finding("kernels", False, "No module named 'triton'")
    assert not found[1].ok
    assert found[1].text.endswith("; uninstall the package with another.package:register")
