"""docs/training.md: checks beyond those of `test_docs.py`.

`tests/server/test_training_guide.py` runs the page's CPU commands.
"""

import json
import re

from sglang_dflash.train.__main__ import make_parser
from tests.fixtures import guide

GUIDE = guide.DOCS / "training.md"
COMMANDS = guide.commands(GUIDE)


def test_torchrun_accepts_its_command():
    from torch.distributed.run import get_args_parser

    (command,) = (command for command in COMMANDS if command[0] == "torchrun")
    parsed = get_args_parser().parse_args(command[1:])
    assert (parsed.nproc_per_node, parsed.module, parsed.training_script) == ("8", True, "sglang_dflash.train")
    assert make_parser().parse_args(parsed.training_script_args).rows % 8 == 0


def test_torchrun_passes_every_option_on():
    """No trainer option may abbreviate torchrun's: torchrun would parse or refuse it even after the module's name."""
    from torch.distributed.run import get_args_parser

    of_torchrun = get_args_parser()._option_string_actions
    draft = next(a for a in make_parser()._actions if a.dest == "command").choices["draft"]
    taken = [own for own in draft._option_string_actions if any(name.startswith(own) for name in of_torchrun)]
    assert taken == ["-h", "--help"]


def test_vllm_gets_the_method_and_the_block_size_without_the_anchor():
    (command,) = (command for command in COMMANDS if command[0] == "vllm")
    config = json.loads(command[command.index("--speculative-config") + 1])
    block_size = make_parser().parse_args(["draft", "--target", "t", "--data", "d", "--out", "o"]).block_size
    assert config == {"method": "dflash", "model": "my-draft", "num_speculative_tokens": block_size - 1}


def test_options_in_the_prose_exist():
    text = re.sub(r"^```sh\n.*?^```", "", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(--[a-z0-9-]+)", text))
    draft = next(a for a in make_parser()._actions if a.dest == "command").choices["draft"]
    assert named
    assert named <= set(draft._option_string_actions)


def test_arithmetic_of_a_step():
    """Compute the guide's FLOP of a training step from the sizes of Qwen3-8B.

    It has 8.2 billion parameters, hidden size 4,096, 32 query and 8 KV heads of 128, intermediate size 12,288, and a
    vocabulary of 151,936.
    """
    R, L, A, N, H, layers = 4, 1024, 64, 16, 4096, 5
    layer = H * 128 * (32 + 8 + 8 + 32) + 3 * H * 12288
    context = layers * H * H + layers * H * 128 * 16  # fc, and every layer's K and V
    parts = [2 * 8.2e9 * R * L, 6 * (layers * layer * R * A * N + context * R * L), 4 * 151_936 * H * R * A * (N - 1)]
    target, draft, head = (round(part / 1e12) for part in parts)
    page = " ".join(GUIDE.read_text().split())
    assert f"a step takes {target + draft + head} TFLOP (P): the target {target}, the draft {draft} and" in page
    assert f"the output head {head}. `--cache` saves the target's {target} from the second epoch on." in page
    assert f"{(layers * H * 2 + 4) / 1e3:.0f} kB a token" in page
