"""Initial weights of a draft: random, the target's last layers, or another draft's."""

from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from sglang_dflash.engine.draft.record import SECOND
from sglang_dflash.engine.draft.variants import DOMINO
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.draft import Layer
from sglang_dflash.train.features import weights_digest
from sglang_dflash.train.loop import differing

RANDOM, TARGET = "random", "target"
DOMINO_FIELDS = ("projector_type", *DOMINO)
FREE = ("block_size", "dtype", "max_position_embeddings")  # config.json fields that may differ from the other draft's


def start(draft: DraftModel, target: PreTrainedModel, source: str) -> str:
    """Initialise a draft in place, and return a name of its initial weights. A checkpoint stores this name.

    The name is `random`, `target`, or a digest of another draft's weights.

    Args:
        source: `random`, `target`, or the folder or hub name of another draft. A DFlash 2 draft may start from a DFlash
            draft. Then DFlash 2's additions have no effect at first. The other draft may have fewer layers. Then the
            last layers of this one have no effect at first.

    Raises:
        ValueError: the other draft has other settings, such as sizes or feature layers, or the target has fewer layers
            than the draft that it initialises.
        OSError: there is no such draft, or it cannot be fetched.
    """
    initialised(draft)
    if source == TARGET:
        start_from(draft, target)
    if source in (RANDOM, TARGET):
        return source
    other = DraftModel.from_pretrained(source, dtype=torch.float32)
    free = FREE if other.candidate_selector else (*FREE, "architectures", *SECOND)
    free = free if other.domino else (*free, *DOMINO_FIELDS)
    free = free if other.config.draft_vocab_size else (*free, "draft_vocab_size")
    fixed, wanted = (
        {
            name: value
            for name, value in (fields | fields["dflash_config"]).items()
            if name not in ("dflash_config", *free)
        }
        for fields in (other.config.to_json(), draft.config.to_json())
    )
    n_layers = min(len(other.layers), len(draft.layers))
    wanted |= {"num_hidden_layers": n_layers, "layer_types": wanted["layer_types"][:n_layers]}
    if unlike := differing(fixed, wanted):
        raise ValueError(
            f"--start-from {source} is a draft with other settings ({unlike}); give its settings, or another draft"
        )
    draft.load_state_dict(other.state_dict(), strict=False)
    add_layers(draft, n_layers)
    return weights_digest(other)


@torch.no_grad()
def add_layers(draft: DraftModel, n_layers: int) -> None:
    """Start the layers after the first `n_layers` as the identity, with the weights of the last layer before them.

    Only the output projections of their attention and MLP are zero, so they learn from the first step on.
    """
    for added in draft.layers[n_layers:]:
        layer = cast(Layer, added)
        layer.load_state_dict(draft.layers[n_layers - 1].state_dict())
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            for parameter in projection.parameters():
                parameter.zero_()


def initialised(draft: DraftModel, std: float = 0.02) -> DraftModel:
    """Initialise matrices from a normal distribution, and additions of DFlash 2 and Domino so that they have no effect.

    Convolutions start as the identity. A selector's pairwise scores start at zero: its successor codebook is zero, and
    its predecessor codebook is random, so that gradients are not zero. Domino's corrections start at zero.
    """
    for name, parameter in draft.named_parameters():
        if name.endswith(("kernel_projection.weight", "successor_codebook", "embed_proj.2.weight")):
            torch.nn.init.zeros_(parameter)
        elif name.endswith("predecessor_codebook"):
            torch.nn.init.normal_(parameter)
        elif parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=std)
    return draft


@torch.no_grad()
def start_from(draft: DraftModel, target: PreTrainedModel) -> None:
    """Copy the target's last layers into a draft: each norm and matrix of equal name and shape.

    The final norm is also copied. `hidden_norm` gets the input norm of the first copied layer. `fc` passes on only
    the last feature layer, by default the input of the target's last layer. A norm's weight is computed as its
    output for an input of ones, because some models add 1 to the stored weight.
    """
    decoder = target.get_decoder()
    if len(draft.layers) > len(decoder.layers):
        raise ValueError(
            f"--layers {len(draft.layers)} exceeds the {len(decoder.layers)} layers of the target, which initialise "
            f"the draft; give --layers {len(decoder.layers)}, or --start-from random"
        )
    layers = decoder.layers[-len(draft.layers) :]
    if "input_layernorm" not in dict(layers[0].named_children()) or "norm" not in dict(decoder.named_children()):
        raise ValueError("the target's layers are not built like a draft's; give --start-from random")
    pairs = [(draft.norm, decoder.norm), (draft.hidden_norm, layers[0].input_layernorm)]
    for own_layer, layer in zip(draft.layers, layers, strict=True):
        found = dict(layer.named_modules())
        pairs += [(own, found[name]) for name, own in own_layer.named_modules() if name in found]
    for own, its in pairs:
        if isinstance(own, nn.RMSNorm) and own.weight.shape == its.weight.shape:
            own.weight.copy_(its(torch.ones_like(own.weight, dtype=target.dtype)))
        elif isinstance(own, nn.Linear) and own.weight.shape == its.weight.shape:
            own.weight.copy_(its.weight)  # a draft's matrices have no bias
    draft.fc.weight.zero_()
    draft.fc.weight[:, -draft.config.hidden_size :] = torch.eye(draft.config.hidden_size, device=draft.device)
