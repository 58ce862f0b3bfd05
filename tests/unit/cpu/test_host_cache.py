"""What goes to the host's pool and comes back is what it was, in both layouts."""

import pytest
import torch

from sglang_dflash.cpu import host_cache

N_LAYERS, N_SLOTS, WIDTH = 3, 24, 5


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("by_pages", [False, True])
def test_there_and_back(by_pages: bool, page_size: int) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, N_LAYERS, N_SLOTS, WIDTH)
    device = [*keys, *values]
    n_host = 32
    inside = (n_host // page_size, N_LAYERS, page_size) if by_pages else (N_LAYERS, n_host)
    host = torch.zeros(2, *inside, WIDTH)
    source, there, back = torch.arange(4, 12), torch.arange(16, 24), torch.arange(12, 20)
    before = torch.stack(device)
    if by_pages:
        host_cache.transfer_kv_all_layer_direct_lf_pf(device, list(host), source, there, page_size)
    else:
        host_cache.transfer_kv_direct(device, [*host[0], *host[1]], source, there, page_size)
    for layer in range(N_LAYERS):
        targets = [keys[layer], values[layer]]
        if by_pages:
            host_cache.transfer_kv_per_layer_direct_pf_lf(list(host), targets, there, back, layer, page_size)
        else:
            host_cache.transfer_kv_direct(list(host[:, layer]), targets, there, back, page_size)
    assert torch.equal(torch.stack(device)[:, back], before[:, source])
    assert torch.equal(torch.stack(device)[:, :12], before[:, :12])
