"""Shadows of families whose forwards take no positions, or one mask for all layers, run without those too."""

import pytest
import torch

from benchmarks.tiny_families import make
from spec_trl.generation.engine.shadow import make_shadow, share_weights


@pytest.mark.parametrize("family", ["bart", "gpt_neo"])
def test_a_forward_over_whole_rows(family: str) -> None:
    model = make(family)
    shadow = make_shadow(model)
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        for network in (shadow, share_weights(shadow), make_shadow(shadow)):
            torch.testing.assert_close(network(tokens, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(model(tokens, use_cache=False).logits, expected), "the policy itself is left as it was"
