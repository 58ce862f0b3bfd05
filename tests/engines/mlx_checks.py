"""The MLX implementation gives the tokens and steps of `oracle.json`, in an environment without torch and SGLang.

`tests/unit/test_mlx.py` runs this file. Checkpoints are converted to fp32, because mlx-lm rounds norm weights when it
adds 1 to them in their own dtype, and rounding could change steps.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama, qwen3_5
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.sample_utils import make_sampler

from sglang_dflash.errors import NotSupported
from sglang_dflash.reference.mlx import Options, Pair, load, spec_steps, stream_generate
from sglang_dflash.reference.mlx.target import MLXTarget
from sglang_dflash.tools.mlx import arguments
from tests.engines.cases import ASSETS, CASES, FULL, IN_FP32, MAX_NEW_TOKENS, ORACLE_STEPS, SLIDING, tokens_of
from tests.fixtures import guide

STANDARD_ERRORS = 5  # largest deviation of a frequency from its probability, in standard errors


def in_fp32(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for file in to.glob("*.safetensors"):
        mx.save_safetensors(
            str(file), {name: array.astype(mx.float32) for name, array in mx.load(str(folder / file.name)).items()}
        )
    return to


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """Return `folders(name)`, which returns the target and draft folders of a case, in fp32."""

    @cache
    def target(name: str) -> Path:
        return in_fp32(ASSETS / name / "target", tmp_path_factory.mktemp("target") / "target")

    @cache
    def both(name: str) -> tuple[Path, Path]:
        draft = CASES[name].draft_folder(tmp_path_factory.mktemp("as_is"))
        return target(CASES[name].target), in_fp32(draft, tmp_path_factory.mktemp("fp32") / "draft")

    return both


def pair_of(folders, name: str) -> Pair:
    return load(*map(str, folders(name)))


def options_for(reference: dict, **others: int | None) -> Options:
    return Options(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=frozenset(reference["stop"]), **others)


def test_there_is_no_other_framework() -> None:
    assert not {"torch", "sglang", "transformers.modeling_utils"} & set(sys.modules)


@pytest.mark.parametrize("name", IN_FP32)
def test_tokens_and_steps_are_plain_torchs(folders, name: str) -> None:
    pair, case = pair_of(folders, name), CASES[name]
    assert len(ORACLE_STEPS[name]) == case.n_prompts
    for reference in ORACLE_STEPS[name]:
        options = options_for(reference, draft_window=case.draft_window)
        assert [list(step) for step in spec_steps(pair, reference["prompt"], options)] == reference["steps"]


def test_smollm2(tmp_path: Path) -> None:
    """Compare 2 answers of SmolLM2-135M-Instruct. `tests/unit/test_mlx.py` writes the files that this test reads."""
    folder = Path(os.environ["SMOLLM2"])
    if not (folder / "oracle.json").exists():
        pytest.skip("the package with SmolLM2 cannot be downloaded")
    pair = load(*(str(in_fp32(folder / name, tmp_path / name)) for name in ("target", "draft")))
    references = json.loads((folder / "oracle.json").read_text())
    n_accepted = [n for reference in references for _, n in reference["steps"]]
    assert sum(n_accepted) > 0.3 * len(n_accepted)
    for reference in references:
        steps = spec_steps(pair, reference["prompt"], options_for(reference))
        assert [list(step) for step in steps] == reference["steps"]


def test_a_sliding_layer_sees_its_window_and_no_more(folders) -> None:
    """The window is 32 tokens, the query's own included. After 60 context tokens slot 0 attends to tokens 29 to 59."""
    mx.random.seed(3)
    attention = pair_of(folders, "sliding-both-ways").draft.layers[0].self_attn
    keys, values = (mx.random.normal((1, attention.n_kv_heads, 60, attention.head_dim)) for _ in range(2))
    hidden_1NH = mx.random.normal((1, 16, attention.q_proj.weight.shape[1]))

    def out_NH(token: int | None) -> mx.array:
        context, changed = KVCache(), mx.array(values)
        if token is not None:
            changed[:, :, token] += 1
        context.update_and_fetch(keys, changed)
        return attention(hidden_1NH, context, None)[0]

    def seen_by(token: int) -> list[int]:
        differs_N = mx.abs(out_NH(token) - out_NH(None)).max(axis=1) > 1e-6
        return [n for n, differs in enumerate(differs_N.tolist()) if differs]

    assert [seen_by(token) for token in (28, 29, 30)] == [[], [0], [0, 1]]
    assert seen_by(59) == list(range(16))


def test_streamed_text_is_the_text_of_the_answer(folders) -> None:
    pair, reference = pair_of(folders, "hybrid"), ORACLE_STEPS["hybrid"][0]
    options = options_for(reference)
    parts = list(stream_generate(pair, reference["prompt"], options))
    wanted = [token for token in tokens_of(reference) if token not in reference["stop"]]
    assert "".join(text for text, _ in parts) == pair.tokenizer.decode(wanted)
    assert len([text for text, _ in parts if text]) > 2


@pytest.mark.parametrize("width", [2, 5])
def test_narrow_block_gives_the_same_tokens(folders, width: int) -> None:
    pair = pair_of(folders, "hybrid")
    for reference in ORACLE_STEPS["hybrid"][:3]:
        options = options_for(reference, width=width)
        steps = list(spec_steps(pair, reference["prompt"], options))
        assert [token for step in steps for token in step.committed] == tokens_of(reference)
        assert max(step.n_accepted for step in steps) == width - 1


def test_a_long_prompt_is_read_in_chunks(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, reference = pair_of(folders, "hybrid"), ORACLE_STEPS["hybrid"][0]
    monkeypatch.setattr("sglang_dflash.reference.mlx.generate.PREFILL_CHUNK", 7)
    options = options_for(reference)
    assert [list(step) for step in spec_steps(pair, reference["prompt"], options)] == reference["steps"]


@pytest.mark.parametrize("sampling", [{"temp": 0.7}, {"temp": 2.0, "top_k": 6, "top_p": 0.99}])
def test_drawn_tokens_have_the_targets_distribution(folders, sampling: dict) -> None:
    """Sample three tokens 300 times and compare each triple's frequency with its probability.

    The first token comes from the prefill, the others from a decode step.
    """
    pair, n_draws = pair_of(folders, "dense"), 300
    prompt = undecided(pair)
    mx.random.seed(1)
    sampler = make_sampler(sampling["temp"], sampling.get("top_p", 1.0), top_k=sampling.get("top_k", 0))
    options = Options(max_new_tokens=3, sampler=sampler)
    drawn = Counter(
        tuple(token for step in spec_steps(pair, prompt, options) for token in step.committed) for _ in range(n_draws)
    )
    likely = texts(pair, prompt, sampling)
    assert len(likely) > 3
    assert sum(likely.values()) > 0.5
    for text, p in likely.items():
        assert abs(drawn[text] / n_draws - p) < STANDARD_ERRORS * (p * (1 - p) / n_draws) ** 0.5, text


def undecided(pair: Pair) -> list[int]:
    """Return a prompt with a part of its answer; the next three tokens have about two nats of entropy together."""
    found = []
    for reference in ORACLE_STEPS["dense"]:
        text, n_prompt = reference["prompt"] + tokens_of(reference), len(reference["prompt"])
        p_SV = mx.softmax(pair.target(mx.array(text)[None])[0] / 0.7, axis=-1)
        entropy_S = -(p_SV * mx.log(mx.maximum(p_SV, 1e-30))).sum(-1)
        entropy_sum = (entropy_S[:-2] + entropy_S[1:-1] + entropy_S[2:])[n_prompt:]
        distance = mx.abs(entropy_sum - 2)
        place = int(mx.argmin(distance).item())
        found.append((distance[place].item(), text[: n_prompt + place + 1]))
    return min(found)[1]


def texts(pair: Pair, prompt: list[int], sampling: dict) -> dict[tuple[int, ...], float]:
    """Return the triples of next tokens with a probability of at least 0.01, each with its probability."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, p in found.items():
            p_V = distribution(pair.target(mx.array([*prompt, *text])[None])[0, -1], sampling)
            longer |= {(*text, token): p * q for token, q in enumerate(p_V.tolist()) if p * q >= 0.01}
        found = longer
    return found


def distribution(logits_V: mx.array, sampling: dict) -> mx.array:
    """Compute the sampling distribution as mlx-lm does: top-p and top-k at temperature 1, then the temperature."""
    p_V = mx.softmax(logits_V.astype(mx.float32))
    order_V = mx.argsort(-p_V)
    before_V = mx.cumsum(p_V[order_V]) - p_V[order_V]
    kept_V = (before_V < sampling.get("top_p", 1.0)) & (mx.arange(len(p_V)) < sampling.get("top_k", len(p_V)))
    mask_V = mx.zeros(p_V.shape, dtype=mx.bool_)
    mask_V[order_V] = kept_V
    return mx.softmax(mx.where(mask_V, mx.log(p_V), -mx.inf) / sampling["temp"])


def test_quantized_target_gives_its_own_tokens(folders, tmp_path: Path) -> None:
    target, draft = folders("dense")
    mlx_lm.convert(str(target), str(tmp_path / "quantized"), quantize=True, q_group_size=32, q_bits=4)
    pair, n_steps = load(str(tmp_path / "quantized"), str(draft)), 0
    for reference in ORACLE_STEPS["dense"][:4]:
        steps = list(spec_steps(pair, reference["prompt"], Options(max_new_tokens=32)))
        alone = generate_step(mx.array(reference["prompt"]), pair.target, max_tokens=32)
        assert [token for step in steps for token in step.committed] == [token for token, _ in alone]
        n_steps += len(steps)
    assert n_steps < 4 * 32 / 2, "hardly a draft was accepted"


SMALL = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
TARGETS = {
    "llama-sliding": lambda: llama.Model(
        llama.ModelArgs(
            model_type="llama", num_hidden_layers=2, sliding_window=9, layer_types=[FULL, SLIDING], **SMALL
        )
    ),
    "qwen3.5": lambda: qwen3_5.Model(
        qwen3_5.ModelArgs("qwen3_5", SMALL | {
            "num_hidden_layers": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        })
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(TARGETS))
def test_rejected_tokens_leave_no_trace(kind: str) -> None:
    """After rejected tokens, logits and features equal those of a target that has read only the kept tokens.

    The text is longer than the sliding window, and mlx-lm's own cache could not restore tokens that left the window.
    """
    mx.random.seed(2)
    model = TARGETS[kind]()
    assert any(isinstance(cache, RotatingKVCache) for cache in model.make_cache()) == (kind == "llama-sliding")
    text, wrong = mx.random.randint(0, 40, (30,)), mx.random.randint(0, 40, (6,))
    target = MLXTarget(model, (0,))
    target.read(text[:20])
    for start, n in ((20, 1), (21, 4), (25, 4)):
        block = mx.concatenate([text[start : start + n], wrong])
        target.read(block)
        target.keep(n)
    found, features = target.read(text[29:])
    fresh = MLXTarget(model, (0,))
    wanted, all_features = fresh.read(text[:30])
    assert mx.allclose(found[0], wanted[-1], atol=1e-5)
    assert mx.allclose(features[0], all_features[-1], atol=1e-5)


def test_target_is_unchanged_afterwards(folders) -> None:
    pair = pair_of(folders, "hybrid")
    calls = {type(layer): type(layer).__call__ for layer in pair.target.layers}
    list(spec_steps(pair, ORACLE_STEPS["hybrid"][0]["prompt"], Options(max_new_tokens=8)))
    assert calls == {kind: kind.__call__ for kind in calls}


# -- refusals, and the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 17}, r"width 17 is not within 2\.\.16\. .* was trained for blocks of 16 tokens .* give a width"),
        ({"width": 0}, r"width 0 is not within 2\.\.16"),
        ({"draft_window": 8}, "draft_window 8 is smaller than the block of 16 tokens; make it at least 16"),
        ({"max_new_tokens": 0}, r"max_new_tokens \(--max-tokens\) is 0"),
    ],
)
def test_options_that_do_not_fit(folders, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(spec_steps(pair_of(folders, "dense"), [5], Options(**{"max_new_tokens": 4} | options)))


def test_pairs_that_do_not_fit(folders, tmp_path: Path) -> None:
    (target, draft), other = folders("dense"), tmp_path / "other"
    config = json.loads((shutil.copytree(draft, other) / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_target_layers": 5}))
    with pytest.raises(ValueError, match="give the draft that was trained for this target"):
        load(str(target), str(other))
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(NotSupported, match=r"is quantized \(fp8\); on MLX give the unquantized draft"):
        load(str(target), str(other))
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    with pytest.raises(NotSupported, match="model_type is 'gemma3_text'; on MLX give a target of type llama or qwen3"):
        load(str(tmp_path), str(draft))
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load(str(tmp_path / "none"), str(draft))
    (bare := tmp_path / "bare").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no/such/model is no folder and cannot be fetched .*; give a checkp"):
        load("no/such/model", str(draft))
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; give a target's folder"):
        load(str(bare), str(draft))


def test_a_cache_that_cannot_be_cut_is_refused() -> None:
    class OtherCache: ...

    class Model:
        def make_cache(self) -> list:
            return [KVCache(), OtherCache()]

    with pytest.raises(
        NotSupported, match=r"cannot take back rejected drafts, .* of type OtherCache; give a target with"
    ):
        MLXTarget(Model(), (0,))


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "sglang_dflash", "mlx", *arguments], capture_output=True, text=True, timeout=120
    )


def test_command_prints_the_answer_and_its_steps(folders) -> None:
    target, draft = map(str, folders("dense"))
    done = run("--model", target, "--draft", draft, "--prompt", "What is 47 + 38?", "--max-tokens", "64")
    assert done.returncode == 0, done.stderr
    text, _, summary = done.stdout.strip().rpartition("\n")
    model, tokenizer = mlx_lm.load(target)[:2]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 47 + 38?"}], add_generation_prompt=True
    )
    assert text.strip() == mlx_lm.generate(model, tokenizer, prompt, max_tokens=64).strip()
    assert "tokens/s" in summary
    assert "drafts accepted" in summary


def test_commands_of_the_page_parse() -> None:
    commands = guide.commands(guide.DOCS / "engines.md")
    ours = [words[2:] for words in commands if words[:2] == ["sglang-dflash", "mlx"]]
    assert ours
    for argv in ours:
        arguments().parse_args(argv)


def test_command_reports_an_error(folders) -> None:
    target = str(folders("dense")[0])
    done = run("--model", target, "--draft", target, "--prompt", "x")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert target in done.stderr
