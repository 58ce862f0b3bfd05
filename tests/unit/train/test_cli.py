"""`sglang-dflash train`: training a draft for a given target, and one clear error per bad input."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import sglang_dflash
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.train.__main__ import main
from sglang_dflash.train.draft import draft_config_for
from sglang_dflash.train.loop import LOG
from sglang_dflash.train.sizes import check_target, intermediate_size
from sglang_dflash.train.tiny_pair import make_tokenizer

ASSETS = Path(sglang_dflash.__file__).parent / "assets"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def target(tmp_path_factory, tokenizer):
    """Return a folder with a tiny Qwen3 of random weights and its tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3, 4, 5, 6, 7, 8."}]
    path.write_text("\n".join([json.dumps({"messages": turns})] * 6))
    return path


def command(target, data, out, *more) -> list[str]:
    sizes = "--layers 1 --block-size 4 --rows 2 --anchors 4 --steps 4 --warmup-steps 1 --eval-tokens 8"
    where = ["--target", str(target), "--data", str(data), "--out", str(out)]
    return ["draft", *where, *sizes.split(), "--dtype", "fp32", "--device", "cpu", *more]


@pytest.mark.parametrize("second", [False, True], ids=["dflash", "dflash2"])
def test_a_trained_draft_can_generate(target, data, tmp_path, tokenizer, second):
    sizes = ("--dflash2", "--conv-group-size", "8", "--selector-rank", "6", "--selector-top-k", "4")
    assert main(command(target, data, tmp_path / "draft", *(sizes if second else ()))) == 0
    draft = DraftModel.from_pretrained(tmp_path / "draft")
    config = draft.config
    assert (config.block_size, config.mask_token_id) == (4, tokenizer.mask_token_id)
    found = config.conv_kernel_size, config.conv_group_size, config.selector_rank, config.selector_top_k
    assert not second or found == (2, 8, 6, 4)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    input_ids = torch.tensor([tokenizer.encode("Count.")])
    printed = draft.spec_generate(input_ids, model, 10, stop_token_ids=[2])
    assert torch.equal(printed, model.generate(input_ids, max_new_tokens=10, do_sample=False))


def test_a_resumed_draft_equals_an_uninterrupted_one(target, data, tmp_path, monkeypatch):
    from sglang_dflash.train import runs

    assert main(command(target, data, tmp_path / "whole", "--report-every", "1")) == 0
    uncut = runs.train_draft
    monkeypatch.setattr(runs, "train_draft", lambda *args, **options: uncut(*args, **options, stop_after=2))
    assert main(command(target, data, tmp_path / "cut", "--report-every", "1")) == 0
    monkeypatch.undo()
    assert main(command(target, data, tmp_path / "cut", "--report-every", "1")) == 0
    whole, cut = (DraftModel.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert (tmp_path / "whole" / LOG).read_text() == (tmp_path / "cut" / LOG).read_text()


@pytest.mark.parametrize("more", [["--seed", "1"], ["--anchors", "3"], ["--rows", "1"], ["--max-length", "9"]])
def test_resuming_with_other_options_is_refused(target, data, tmp_path, capsys, more):
    assert main(command(target, data, tmp_path / "draft", "--steps", "1")) == 0
    assert main(command(target, data, tmp_path / "draft", "--steps", "1", *more)) == 2
    assert "was written by another run" in capsys.readouterr().err


def test_a_refusal_to_resume_has_only_the_keys_that_differ(target, data, tmp_path, capsys):
    assert main(command(target, data, tmp_path / "draft", "--steps", "1")) == 0
    assert "1 steps of 2 documents are 0.40 epochs of the other 5" in capsys.readouterr().out
    assert main(command(target, data, tmp_path / "draft", "--steps", "1", "--block-size", "5")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "(draft.block_size 4, now 5" in error
    assert "hidden_size" not in error


def test_a_saved_draft_follows_the_umask(target, data, tmp_path):
    assert main(command(target, data, tmp_path / "draft", "--steps", "1")) == 0
    modes = {(tmp_path / "draft" / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1


def test_reported_numbers(target, data, tmp_path, capsys):
    assert main(command(target, data, tmp_path / "draft")) == 0
    (line,) = [json.loads(line) for line in (tmp_path / "draft" / LOG).read_text().splitlines()]
    always, with_prompts = {"step", "loss", "held_out_loss", "target_agrees"}, {"tokens_per_step", "accepted_at_slot"}
    assert line.keys() == always | with_prompts
    assert line["tokens_per_step"] == pytest.approx(1 + sum(line["accepted_at_slot"]))
    assert len(line["accepted_at_slot"]) == 3
    assert "6 documents with " in capsys.readouterr().out
    assert main(command(target, data, tmp_path / "without", "--eval-prompts", "0", "--steps", "1")) == 0
    assert json.loads((tmp_path / "without" / LOG).read_text()).keys() == always, "no acceptance is claimed"


def test_a_plot_of_loss_and_acceptance(target, data, tmp_path, monkeypatch):
    """It is drawn with every checkpoint, and for a run that has ended."""
    drawn = []
    monkeypatch.setattr("sglang_dflash.plot.draw", lambda rows, path, title: drawn.append(rows))
    more = ["--plot", str(tmp_path / "run.png"), "--report-every", "2", "--save-every", "2"]
    assert main(command(target, data, tmp_path / "draft", *more)) == 0
    ((loss, length, by_slot),) = drawn[-1]
    assert {name: list(curve.x) for name, curve in loss.curves.items()} == {"loss": [2, 4], "held_out_loss": [2, 4]}
    assert list(length.curves["tokens_per_step"].x) == [2, 4]
    assert list(by_slot.curves["step 4"].x) == [1, 2, 3]
    assert [list(rows[0][0].curves["loss"].x) for rows in drawn] == [[2], [2, 4], [2, 4]]
    drawn.clear()
    assert main(command(target, data, tmp_path / "draft", *more)) == 0
    assert len(drawn) == 1
    assert main(command(target, data, tmp_path / "without", *more, "--eval-prompts", "0")) == 0
    assert [panel.title for panel in drawn[-1][0]] == ["Loss"]


def test_acceptance_needs_no_undoing_of_tokens(target, data, tmp_path, monkeypatch):
    """A target that cannot take back rejected drafts can have a draft too."""
    monkeypatch.setattr("sglang_dflash.reference.torch.target.DynamicLayer", type("OtherLayer", (), {}))
    assert main(command(target, data, tmp_path / "draft")) == 0
    assert "tokens_per_step" in (tmp_path / "draft" / LOG).read_text()


def test_a_cache_is_announced_and_used_only_by_its_own_run(target, data, tmp_path, tokenizer, capsys):
    cached = ["--cache", str(tmp_path / "cache")]
    assert main(command(target, data, tmp_path / "with", *cached)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"tokens x \(32 features x 4 bytes \+ 4\) = [\d.]+ kB; .* are free", printed)
    assert main(command(target, data, tmp_path / "without")) == 0
    drafts = [DraftModel.from_pretrained(tmp_path / name).state_dict() for name in ("with", "without")]
    for name in drafts[0]:
        torch.testing.assert_close(drafts[0][name], drafts[1][name], atol=1e-5, rtol=0)
    assert main(command(target, data, tmp_path / "other", *cached, "--target-layer-ids", "0")) == 2
    assert "was made with other settings (target_layer_ids [2], now [0])" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "printed"),
    [
        (
            ["--target-layer-ids", "0,3"],
            "--target-layer-ids 0,3 is not an ascending list within 0..2, the layers of a target of 4",
        ),
        (["--target-layer-ids", "1,0"], "--target-layer-ids 1,0 is not an ascending list within 0..2"),
        (["--layers", "5"], "--layers 5 exceeds the 4 layers of the target, which initialise the draft"),
        (["--mask-token-id", "5000"], "the mask token 5000 is not within 0.."),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda: torch finds no GPU; drop --device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["--data", "nowhere.txt"], "nowhere.txt is no file; correct the path"),
        (["--plot", "run.gif"], "--plot run.gif has no suffix of a picture; end it with one of .png, .svg, .pdf"),
        (["--minutes", "2"], "--steps 4 and --minutes 2 both end the training; drop one of them"),
        (["--device", "gpu"], "--device gpu is no device of torch; give cpu, cuda or cuda:N"),
        (["--selector-rank", "8"], "--selector-rank has an effect only with --dflash2; add --dflash2, or drop it"),
        (
            ["--emb-dim", "8"],
            "--emb-dim has an effect only with --projector domino; add --projector domino, or drop it",
        ),
        (["--draft-vocab-size", "99999"], "--draft-vocab-size 99999 exceeds the target's vocabulary of"),
        (["--dflash2", "--conv-group-size", "3"], "--conv-group-size 3 does not divide the target's hidden size 32"),
        (["--dflash2", "--conv-group-size", "8", "--selector-top-k", "99999"], "--selector-top-k 99999 exceeds the"),
        (["--data", "notes.md"], "neither .txt nor .jsonl"),
        (["--target", "/no/such/target"], "/no/such/target"),
    ],
)
def test_bad_input_gets_one_clear_error(target, data, tmp_path, capsys, more, printed):
    assert main(command(target, data, tmp_path / "draft", *more)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("train: ")
    assert printed in error


@pytest.mark.parametrize(
    ("more", "printed"),
    [
        (["--steps", "0"], "--steps: '0' is not a whole number above 0"),
        (["--rows=-1"], "--rows: '-1' is not a whole number above 0"),
        (["--warmup-steps", "few"], "--warmup-steps: 'few' is not a whole number of 0 or more"),
        (["--learning-rate", "0"], "--learning-rate: '0' is not a number above 0"),
        (["--gamma", "nan"], "--gamma: 'nan' is not a number above 0"),
    ],
)
def test_a_number_outside_its_range_is_refused(target, data, tmp_path, capsys, more, printed):
    with pytest.raises(SystemExit):
        main(command(target, data, tmp_path / "draft", *more))
    assert printed in capsys.readouterr().err


def test_a_run_with_a_time_limit(target, data, tmp_path, capsys):
    more = ["--minutes", "0.01", "--report-every", "1", "--save-seconds", "60"]
    arguments = command(target, data, tmp_path / "draft", *more)
    first = arguments.index("--steps")
    assert main(arguments[:first] + arguments[first + 2 :]) == 0
    assert "0.01 minutes of steps of 2 documents" in capsys.readouterr().out
    state = torch.load(tmp_path / "draft" / "checkpoint.pt", weights_only=True)
    assert state["seconds"] >= 0.6
    assert len((tmp_path / "draft" / LOG).read_text().splitlines()) == state["step"]


def test_a_target_of_one_layer_is_refused():
    target = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ValueError, match=r"the target has one layer, .*; give a deeper target"):
        draft_config_for(target, n_layers=1, block_size=4, mask_token_id=1)


def test_a_target_without_a_size_is_refused():
    fields = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with pytest.raises(ValueError, match=r"the target's config has no rms_norm_eps, which the draft would copy"):
        check_target(fields, None)


def test_a_target_of_experts_only_gets_a_draft_as_wide_as_published_ones():
    """Qwen3.5's mixture-of-experts configs have no intermediate_size."""
    read = json.loads((ASSETS / "models.json").read_text())
    drafts = [one["config"] for one in read["drafts"].values()]
    sizes = {(one["hidden_size"], one["intermediate_size"]) for one in drafts}
    moe = [one["config"].get("text_config", {}) for one in read["targets"].values()]
    lacking = [fields for fields in moe if "moe" in fields.get("model_type", "") and "intermediate_size" not in fields]
    assert lacking
    assert {(fields["hidden_size"], intermediate_size(fields)) for fields in lacking} <= sizes
    assert intermediate_size({"hidden_size": 8, "intermediate_size": 5}) == 5


@pytest.mark.parametrize("name", ["data.txt", "data.jsonl"])
def test_text_in_another_encoding_is_refused(target, tmp_path, capsys, name):
    (tmp_path / name).write_bytes("caf\u00e9".encode("latin-1"))
    assert main(command(target, tmp_path / name, tmp_path / "draft")) == 2
    assert f"{name} is not UTF-8 text (byte 3); convert it to UTF-8" in capsys.readouterr().err


def test_a_partial_line_of_the_log_is_dropped(target, data, tmp_path):
    out = tmp_path / "draft"
    assert main(command(target, data, out, "--steps", "1", "--report-every", "1")) == 0
    whole = (out / LOG).read_text()
    (out / LOG).write_text(whole + whole[:20])
    assert main(command(target, data, out, "--steps", "1", "--report-every", "1")) == 0
    assert (out / LOG).read_text() == whole


def test_a_tokenizer_without_a_mask_token_is_refused(target, data, tmp_path, tokenizer, capsys):
    bare = tmp_path / "target"
    AutoModelForCausalLM.from_pretrained(target).save_pretrained(bare)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(bare)
    assert main(command(bare, data, tmp_path / "draft")) == 2
    assert "has no mask token; give --mask-token-id an unused token id" in capsys.readouterr().err


def test_target_steps_of_a_dflash2_draft_are_refused(tmp_path, capsys):
    assert main(["tiny", "--out", str(tmp_path), "--dflash2", "--target-steps", "5"]) == 2
    assert "--dflash2 trains no target; drop --target-steps" in capsys.readouterr().err
