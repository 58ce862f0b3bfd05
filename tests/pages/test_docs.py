"""Documentation: links to files lead somewhere, commands parse, and every flag, variable, metric and field exists.

The memory table of memory.md and the least kernel times in kernels/README.md are recomputed. Every file of
launch/results has its command in reproducing.md.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from sglang_dflash_kernels.cases.sizes import QWEN_27B
from sglang_dflash_kernels.record import record_width

from sglang_dflash import flags
from sglang_dflash.__main__ import PROGRAMS
from sglang_dflash.engine.metrics.table import METRICS, PREFIX
from sglang_dflash.engine.width.chooser import Chooser
from sglang_dflash.engine.width.policy import Fixed
from sglang_dflash.flags import Worker
from sglang_dflash.tools.capacity import report as capacity_report
from tests.fixtures import guide

ROOT, DOCS = guide.ROOT, guide.DOCS
PAGES = sorted(DOCS.glob("*.md"))
READMES = [ROOT / "README.md", ROOT / "kernels" / "README.md"]
OTHER_PAGES = [ROOT / name for name in ("LOG.md", "CHANGELOG.md", "CONTRIBUTING.md", "env/README.md")]
LINKING = [*PAGES, *READMES, *OTHER_PAGES, *(ROOT / "launch").rglob("*.md")]
CHECKED = [*PAGES, ROOT / "README.md"]
of_pages = pytest.mark.parametrize("page", CHECKED, ids=lambda page: page.name)


def code(page: Path) -> list[str]:
    text = page.read_text()
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return fenced + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


# -- links ---------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"https?:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def test_the_index_has_every_page_and_the_readme_has_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    assert not [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index]
    assert "(sglang_dflash/docs/README.md)" in (ROOT / "README.md").read_text()


def test_each_development_tool_is_listed() -> None:
    listed = set(re.findall(r"`python -m ([\w.]+)`", (ROOT / "launch" / "README.md").read_text()))
    paths = [path for path in (ROOT / "tests" / "tools").rglob("*.py") if "__main__" in path.read_text()]
    assert listed == {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}


def test_the_diagram_is_for_light_and_dark() -> None:
    text = (DOCS / "how-it-works.svg").read_text()
    named = {element.tag.split("}")[1] for element in ElementTree.fromstring(text)}
    assert {"title", "desc", "style"} <= named
    colours = re.findall(r"svg \{(.*?)\}", text, re.DOTALL)
    light, dark = (set(re.findall(r"(--[\w-]+): #", block)) for block in colours)
    assert light == dark == set(re.findall(r"var\((--[\w-]+)\)", text))
    assert not re.search(r'(fill|stroke)="#', text), "a colour that does not change with the scheme"


# -- commands ------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[list[str]]:
    """Return the commands in ```sh blocks and code spans, without comments, assignments and redirections."""
    found = guide.commands(page)
    begins = re.compile(rf"python |make |sglang-dflash ({'|'.join(PROGRAMS)})\b")
    found += [shlex.split(span) for span in code(page) if begins.match(span) and "\n" not in span]
    return [as_module(without_shell(words)) for words in found if words[0] != "#"]


def without_shell(words: list[str]) -> list[str]:
    end = min((words.index(word) for word in ("#", ">") if word in words), default=len(words))
    return words[next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) : end]


def as_module(words: list[str]) -> list[str]:
    """Replace `sglang-dflash NAME` by `python -m MODULE`, the module that it runs."""
    if words[0] != "sglang-dflash" or len(words) == 1:
        return words
    module = PROGRAMS[words[1]].partition(":")[0].removesuffix(".__main__")
    return ["python", "-m", module, *words[2:]]


COMMANDS = list(dict.fromkeys(tuple(words) for page in CHECKED for words in commands(page)))
MODULES = [words for words in COMMANDS if words[0].endswith("python") and words[1] == "-m"]
FOR_SERVERS = "--model-path"


class Parsed(Exception):
    """Exception that stops a program when it has parsed its command line."""


def for_sglang(words: tuple[str, ...]) -> bool:
    return words[2] == "sglang.launch_server" or (words[2] == "sglang_dflash.tools.check" and FOR_SERVERS in words)


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    others = [words for words in COMMANDS if words not in MODULES]
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    for words in others:
        match words:
            case ("make", target, *_):
                assert target in targets[1].split(), words
            case ("vllm", "serve", *given):
                assert json.loads(given[given.index("--speculative-config") + 1])["method"] == "dflash"
            case ("python", script, *_):
                assert (ROOT / script).is_file(), words
            case ("export", variable):
                flags.read(dict([variable.split("=", 1)]))
            case ("torchrun", *_):
                pass  # in training.md, checked by test_train_guide.py
            case ("curl", url, *_):
                assert url in {f"http://127.0.0.1:30000/{path}" for path in ("generate", "v1/chat/completions")}
            case _:
                assert words == ("pip", "install", "."), words


@pytest.mark.parametrize("words", [words for words in MODULES if not for_sglang(words)], ids=" ".join)
def test_programs_accept_their_commands(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    module, argv = words[2], list(words[3:])
    if module == "pytest":
        assert all((ROOT / path).exists() for path in argv)
        return
    spec = importlib.util.find_spec(module)
    assert spec is not None
    is_pattern = any(re.search(r"^\[|^\.\.\.$|^[A-Z]+$", word) for word in argv)
    if is_pattern or argv[:1] == ["--server"] or not argv:
        return
    take = argparse.ArgumentParser.parse_args

    def take_and_stop(*args: Any, **kwargs: Any) -> None:
        take(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", take_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *argv])
    main = importlib.import_module(f"{module}.__main__" if spec.submodule_search_locations else module).main
    with pytest.raises(Parsed):
        main(*([argv] if inspect.signature(main).parameters else []))


@pytest.mark.parametrize("words", [words for words in MODULES if for_sglang(words)], ids=" ".join)
def test_sglang_accepts_its_commands(words: tuple[str, ...], launch: Any) -> None:
    ended = launch("parse", *words[3:])
    assert ended.code == 0, ended.err


def test_servers_of_a_benchmark_accept_their_flags(launch: Any) -> None:
    for words in MODULES:
        if words[2] == "sglang_dflash.tools.bench" and "--" in words and "..." not in words:
            ended = launch("parse", *words[words.index("--") + 1 :])
            assert ended.code == 0, ended.err


# -- names ---------------------------------------------------------------------------------------------------------


@of_pages
def test_variables_exist(page: Path) -> None:
    ours = {flag.name for flag in flags.FLAGS} | set(flags.STOCK_ONLY)
    named = set(re.findall(r"\bSGLANG_[A-Z0-9_]*[A-Z0-9]\b", page.read_text()))
    assert not named - ours - guide.variables_of_sglang()


OURS = [*(ROOT / "sglang_dflash").rglob("*.py"), *(ROOT / "tests" / "tools").rglob("*.py")]
# Flags that are read without argparse, and flags of other programs.
OTHERS = {"--json", "--server", "--help", "--config", "--nproc-per-node", "--no-deps", "--target"}
OF_VLLM = {"--speculative-config", "--max-num-batched-tokens", "--no-enable-prefix-caching"}
OF_ROUTER = {"--policy", "--worker-urls", "--pd-disaggregation", "--prefill", "--decode"} | {
    "--health-check-interval-secs",
    "--health-failure-threshold",
}
OF_PYTEST = {"--lf", "--tb", "--pdb"}


@pytest.mark.parametrize("page", [page for page in CHECKED if page.name != "training.md"], ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    fields = re.findall(r"^    (\w+): A\[", guide.source_of_sglang("srt/arg_groups/fields"), re.MULTILINE)
    known = {"--" + field.replace("_", "-") for field in fields} | set(flags.OLD_NAMES)
    known |= OTHERS | OF_VLLM | OF_ROUTER | OF_PYTEST
    for path in OURS:
        for names in re.findall(r"add(?:_argument)?\(\s*((?:\"--[a-z0-9-]+\",?\s*)+)", path.read_text()):
            known |= set(re.findall(r"--[a-z0-9-]+", names))
    # `git checkout COMMIT && COMMAND`: an older commit may have had other flags.
    spans = [span for span in code(page) if not span.startswith("git checkout ")]
    named = {name for span in spans for name in re.findall(r"(?<![\w…-])--[a-z][a-z0-9-]*[a-z0-9](?![\w…-])", span)}
    assert not named - known


@of_pages
def test_metrics_exist(page: Path) -> None:
    named = set(re.findall(r"sglang:dflash_\w+", page.read_text()))
    assert named <= {name for metric in METRICS for name in (PREFIX + metric.name, *metric.exported())}


@of_pages
def test_fields_of_server_info_exist(page: Path) -> None:
    """`dflash.a.b` in a page stands for `internal_states[0]["dflash"]["a"]["b"]`."""
    worker = (ROOT / "sglang_dflash" / "engine" / "worker.py").read_text()
    known = set(re.findall(r'^            "(\w+)": ', worker[worker.index("def describe") :], re.MULTILINE))
    known |= {f"width.{name}" for name in Chooser(Fixed(1)).describe()}
    assert {"draft_kv_bytes", "width.account"} <= known
    assert set(re.findall(r"`dflash\.([\w.]+)`", page.read_text())) <= known


# -- numbers -------------------------------------------------------------------------------------------------------


def test_every_result_can_be_reproduced() -> None:
    """For each file of launch/results, reproducing.md must have a line with a link to the file and its command.

    `git checkout COMMIT` may precede the command.
    """
    page = (DOCS / "reproducing.md").read_text()
    for path in sorted((ROOT / "launch" / "results").glob("*.json")):
        lines = [line for line in page.splitlines() if f"results/{path.name})" in line]
        assert lines, path.name
        command = rf"`(git checkout [0-9a-f]{{7,9}} && )?{re.escape(json.loads(path.read_text())['command'])}`"
        assert any(re.search(command, line) for line in lines), path.name


AS_CHECKED = {
    "--mem-fraction-static": "--mem-fraction",
    "--speculative-num-draft-tokens": "--block",
    "--speculative-draft-window-size": "--window",
}


def test_the_table_of_memory() -> None:
    rows = re.findall(r"^\| (?:none|`(--.*?)`) \| (\d+) \| (\d+) \|", (DOCS / "memory.md").read_text(), re.MULTILINE)
    assert len(rows) == 8
    for flag, states, tokens in rows:
        name, *value = flag.split() or [""]
        argv = ["--model", "Qwen3.5-27B", "--gpu-memory", "140.4", *filter(None, [AS_CHECKED.get(name, name)]), *value]
        report = capacity_report.answer(capacity_report.arguments().parse_args(argv))
        limits = {str(bound): n for bound, n in report.results[Worker.PLUGIN].limits.items()}
        assert (limits["recurrent state"], limits["KV tokens"]) == (int(states), int(tokens)), flag


def test_the_floors_of_the_kernels() -> None:
    """Compute each kernel's least time at B = 8 and N = 16: its bytes divided by an H200's 4.8 TB/s."""
    B, N = 8, 16
    (L, H, G, V, K), (taps, hidden, groups, candidates, rank) = QWEN_27B.recurrent, QWEN_27B.second
    row = QWEN_27B.n_layers * 2 * QWEN_27B.n_heads * QWEN_27B.head_dim * (2 + 2) + 4 * 128 + 16
    state = 4 * H * V * K
    record = 4 * record_width(H, V, G, K)
    inputs = 2 * (2 * G * K + 2 * H * V + 2 * H)
    n_bytes = {
        "plan_block": 32 * B + 28 * B * N,
        "penalise": (8 * N + 4) * B * QWEN_27B.n_vocab,
        "accept": 48 * B + 24 * B * N,
        "append_context": B * N * row,
        "gdn_verify": L * B * (state + N * (record + inputs)),
        "gdn_fold": L * B * (2 * state + N * record),
        "block_conv": 2 * (B * N * (2 * hidden + taps * groups) + taps * hidden),
        "select_path": B * (N - 1) * (2 * (candidates + 2) * rank + 12 * candidates + 8) + 8 * B,
    }
    page = (ROOT / "kernels" / "README.md").read_text()
    for op, n in n_bytes.items():
        assert f"| `{op}` | {shown(n)} | {n / 4.8e6:.3g} us |" in page, (op, shown(n), f"{n / 4.8e6:.3g}")


def shown(n_bytes: float) -> str:
    unit, size = next((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if n_bytes >= size)
    return f"{n_bytes / size:.3g} {unit}"
