"""The network of an MTP head against transformers' own."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_layers import MtpModel

from spec_trl.generation.drafters.eagle3.eagle3_drafter import CAUSAL
from spec_trl.generation.drafters.mtp.mtp_drafter import MtpDrafter
from tests.generation.drafters.mtp.heads import write_heads


PAIRS = 7
THEIRS = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@torch.no_grad()
def test_equals_transformers_own(family: str, tmp_path: Path) -> None:
    """To the last bit, in float64; so do two steps of the head, of which the second reads the output of the first."""
    model, head = write_heads(tmp_path, family)
    network = MtpDrafter(None, model).network
    network.layers[0].self_attn.config._attn_implementation_internal = "eager"  # theirs: both sum in one order
    model.config._attn_implementation = "eager"
    theirs = MtpModel(model, 1).double().eval()
    weights = {}
    for name, tensor in head.items():
        end = name.removeprefix("model.layers.2.")
        part = next((part for part in THEIRS if end.startswith(part)), None)
        if part is not None:
            weights[f"layers.0.{THEIRS[part]}.weight"] = tensor
        elif ".experts." not in end:
            weights[f"layers.0.mtp_block.{end}"] = tensor
    experts = "layers.0.mtp_block.mlp.experts"
    gates, ups, downs = (
        torch.stack([head[f"model.layers.2.mlp.experts.{index}.{part}_proj.weight"] for index in range(4)])
        for part in ("gate", "up", "down")
    )
    weights |= {f"{experts}.gate_up_proj": torch.cat([gates, ups], dim=1), f"{experts}.down_proj": downs}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not [name for name in missing if name.startswith("layers.")]
    assert {name.rpartition(".layers.")[0] for name in unexpected} <= {"", "layers.0.mtp_block"}

    torch.manual_seed(0)
    tokens = torch.randint(3, 64, (2, PAIRS))  # of the pairs
    state = torch.randn(2, PAIRS, 64, dtype=torch.float64)
    positions = torch.arange(PAIRS).expand(2, -1)
    mask = CAUSAL.build(positions, PAIRS, torch.float64)
    embedded = model.get_input_embeddings()(tokens)
    for _ in range(2):
        expected = theirs.forward_layer(0, state, positions, None, input_ids=tokens)
        state = network.fed_back(network(embedded, state, positions, mask, DynamicCache().update))
        assert state.equal(expected)
        logits = network.logits(network(embedded, state, positions, mask, DynamicCache().update), model.lm_head)
        assert logits.equal(model.lm_head(theirs.forward_layer(0, state, positions, None, input_ids=tokens)))
