"""Hooks on SGLang: all of `HOOKS` must be set. Reservations and draft positions must suffice for the widest verify.

A decode server must continue from the token that was transferred to it.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash import flags, plugin
from sglang_dflash.engine import hooks, worker
from sglang_dflash.engine.host import contract
from sglang_dflash.engine.host.admission import hook_tokenizer
from sglang_dflash.engine.host.draft_input import after_transfer
from sglang_dflash.engine.host.names import HOOKS, Name
from sglang_dflash.engine.memory.draft_kv import draft_kv
from sglang_dflash.errors import HostMismatch
from sglang_dflash.flags import Copy, GdnState


def config_of(**more: Any) -> Any:
    """Return the config of a recurrent decode server with copies and a draft window, which needs most hooks."""
    facts = {
        "block_size": 8, "widest": 12, "attention_dp": False, "copy": Copy.AUTO, "disaggregation": "decode",
        "draft": None, "draft_kv": draft_kv(64, 12, "decode"), "gdn_state": GdnState.FOLD,
        "draft_attention_backend": "", "draft_quantization": "fp8", "ignored": (),
        "target": SimpleNamespace(vocab_size=8, recurrent=True, architecture="Qwen3ForCausalLM"),
        "flags": SimpleNamespace(fp8_head=False, returns_features=False, simulated=None),
    }  # fmt: skip
    return SimpleNamespace(**facts | more)


def test_every_listed_hook_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = set[str]()
    monkeypatch.setattr(contract, "set_hooks", hooked.update)
    recurrent = config_of()
    dense = config_of(target=SimpleNamespace(vocab_size=8, recurrent=False, architecture="Qwen3ForCausalLM"))
    for config in (recurrent, dense):
        hooks.hook_scheduler(config)
    simulated = flags.read({"SGLANG_SIMULATE_ACC_LEN": "4"})
    monkeypatch.setattr(flags, "current", lambda: simulated)  # a further hook marks the answers
    hook_tokenizer()
    meter = SimpleNamespace(add=None, idle=None)
    monkeypatch.setattr("sglang_dflash.engine.metrics.meter.Meter.of", lambda reporter: meter)
    hooks.start_metrics(None, SimpleNamespace(current_scheduler_metrics_enabled=True))
    at_registration = set(contract.AT_REGISTRATION)
    assert {name for name, place in HOOKS.items() if place not in hooked} == at_registration


def test_experts_have_a_row_for_every_token_of_the_widest_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = dict[str, Any]()
    monkeypatch.setattr(contract, "set_hooks", hooked.update)
    monkeypatch.setattr("sglang_dflash.engine.stages.outputs.get_cuda_graph_max_batch_size", lambda n: n)
    hooks.hook_scheduler(config_of())  # blocks of 8, verifies of up to 12
    create, _ = hooked[HOOKS["experts"]]
    assert create(dict, max_running_requests=5) == {"max_running_requests": 5 * 12}


def test_metrics_start_only_with_sglangs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.SECTIONS, "metrics", (Name("sglang.srt.server_args", "ServerArgs", "given"),))
    hooks.start_metrics(None, SimpleNamespace(current_scheduler_metrics_enabled=False))
    with pytest.raises(HostMismatch, match="lacks member 'given' of sglang"):
        hooks.start_metrics(None, SimpleNamespace(current_scheduler_metrics_enabled=True))


def test_the_reservation_is_as_wide_as_the_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """`speculative_num_draft_tokens` sets how many KV slots SGLang reserves, and the row length of req_to_token."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_dflash.engine.config import DFlashConfig

    config = config_of(draft_quantization=None, draft_load_format="auto", dtype="float16")
    monkeypatch.setattr(DFlashConfig, "from_server_args", lambda server_args: config)
    monkeypatch.setattr(plugin.host, "require_live", lambda: None)
    server_args = SimpleNamespace(speculative_algorithm="DFLASH", tokenizer_worker_num=1)
    plugin.resolve(server_args, lambda server_args: None)
    decided = resolving_view(server_args)
    assert (decided.speculative_num_draft_tokens, decided.speculative_dflash_block_size) == (12, 8)


def test_draft_positions_reach_past_the_longest_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a context of 100 tokens, one verify of 12 tokens is in flight, and the next one is planned."""
    reached = list[int]()
    model = SimpleNamespace(attach=lambda ends, max_position, backend, fp8_head: reached.append(max_position))
    made = SimpleNamespace(draft_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))
    monkeypatch.setattr(worker, "build_draft_tp_worker", lambda **_: made)
    monkeypatch.setattr(worker, "verified_logits", lambda *_: None)
    for name in ("target_ends", "hidden_states_of"):
        monkeypatch.setattr(worker, name, lambda *_, **__: None)
    monkeypatch.setattr(worker.DFlashWorker, "making_draft", lambda self: nullcontext())
    runner = SimpleNamespace(model=None, lora_manager=None, model_config=SimpleNamespace(context_len=100))
    target: Any = SimpleNamespace(model_runner=runner, device="cpu")
    config = config_of(gdn_state=GdnState.SNAPSHOT)
    worker.DFlashWorker(config, server_args=None, gpu_id=0, nccl_port=0, target_worker=target)  # type: ignore[arg-type]
    assert reached == [100 + 2 * 12]


def test_a_decode_server_continues_from_the_token_sent() -> None:
    sent = SimpleNamespace(
        bonus_tokens=torch.tensor([7]), new_seq_lens=torch.tensor([40]), future_indices=torch.tensor([3])
    )
    state = after_transfer(sent, None)
    assert [x.tolist() for x in (state.bonus_tokens, state.new_seq_lens, state.future_indices)] == [[7], [40], [3]]
