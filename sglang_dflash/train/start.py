"""The weights that a draft starts with: noise, or the target's last layers."""

import torch
from torch import nn
from transformers import PreTrainedModel

from sglang_dflash.model import DraftModel


def initialised(draft: DraftModel, std: float = 0.02) -> DraftModel:
    """Normal matrices and unit norms, as the targets themselves start; DFlash 2 starts as DFlash.

    Convolutions begin as the identity. A selector begins with no say: its successors are zero, and its predecessors
    are not, so that there is a gradient.
    """
    for name, parameter in draft.named_parameters():
        if name.endswith(("kernel_projection.weight", "successor_codebook")):
            torch.nn.init.zeros_(parameter)
        elif name.endswith("predecessor_codebook"):
            torch.nn.init.normal_(parameter)
        elif parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=std)
    return draft


@torch.no_grad()
def start_from(draft: DraftModel, target: PreTrainedModel) -> None:
    """Give a draft the target's last layers: each norm and matrix of the same name and shape, and the final norm.

    The context is at first the last feature layer alone, the one nearest to what those layers read. A norm is copied by
    what it makes of ones, since some models add 1 to its weight.
    """
    decoder = target.get_decoder()
    layers = decoder.layers[-len(draft.layers) :]
    pairs = [(draft.norm, decoder.norm), (draft.hidden_norm, layers[0].input_layernorm)]
    for own_layer, layer in zip(draft.layers, layers, strict=True):
        found = dict(layer.named_modules())
        pairs += [(own, found[name]) for name, own in own_layer.named_modules() if name in found]
    for own, its in pairs:
        if isinstance(own, nn.RMSNorm) and own.weight.shape == its.weight.shape:
            own.weight.copy_(its(torch.ones_like(own.weight, dtype=target.dtype)))
        elif isinstance(own, nn.Linear) and own.weight.shape == its.weight.shape:
            own.load_state_dict(its.state_dict())
    draft.fc.weight.zero_()
    draft.fc.weight[:, -draft.config.hidden_size :] = torch.eye(draft.config.hidden_size, device=draft.device)
