"""What of a target the draft cannot borrow."""

from types import SimpleNamespace

import pytest

from sglang_dflash.ends import target_ends
from sglang_dflash.errors import NotSupported


def test_a_target_that_scales_what_is_embedded_is_refused() -> None:
    """SGLang's own worker asks models for it; a draft would guess badly, and nobody would see why."""
    model = SimpleNamespace(get_dflash_noise_embedding_scale=lambda: 8.0)
    with pytest.raises(NotSupported, match="get_dflash_noise_embedding_scale is not applied to what the draft embeds"):
        target_ends(model)
