import torch
from torch import nn

from sglang_dflash.draft.weights import checkpoint_names, fused_name, lay_side_by_side


def test_parts_of_a_fused_projection_know_their_place() -> None:
    assert fused_name("layers.0.self_attn.k_proj.weight") == ("layers.0.self_attn.qkv_proj.weight", ("k",))
    assert fused_name("layers.1.mlp.up_proj.weight") == ("layers.1.mlp.gate_up_proj.weight", (1,))
    assert fused_name("fc.weight") == ("fc.weight", ())


def test_a_model_s_parameters_name_the_tensors_it_needs() -> None:
    parameters = ["layers.0.self_attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.weight", "norm.weight"]
    names = checkpoint_names(parameters)
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    assert names == {"norm.weight", *(f"layers.0.{part}_proj.weight" for part in parts)}
    assert {fused_name(name)[0] for name in names} == set(parameters)


def test_an_update_of_a_parameter_is_an_update_of_the_stack() -> None:
    layers = [nn.Linear(3, 2, bias=False) for _ in range(4)]
    before = [layer.weight.detach().clone() for layer in layers]
    stack = lay_side_by_side([layer.weight for layer in layers])
    assert torch.equal(stack, torch.stack(before))
    with torch.no_grad():
        layers[2].weight.copy_(torch.full((2, 3), 7.0))  # what a weight loader does
    assert torch.equal(stack[2], torch.full((2, 3), 7.0))
    assert torch.equal(stack[1], before[1])
