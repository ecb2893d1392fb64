"""The roofline's formulas against ER §3.2 worked out by hand, and what the additional terms do."""

from dataclasses import replace

import pytest

from spec_trl.generation.planner.model_constants import ModelConstants
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.efficient_rollout.sweep import MODES


CONSTANTS = ModelConstants(
    name="seven billion",
    weight_bytes=15e9,
    draft_weight_bytes=5e9,
    dense_flops=14e9,
    attention_flops=4e5,
    kv_bytes=5e4,
)
PAPER = Coefficients(F_eff=2e14, BW_eff=1.5e12, rho_kappa=0.5, eta_D=1.3, c_T=4e-5, c_D=7e-5, c_V=1.5e-4)
MOE = replace(CONSTANTS, expert_bytes=12e9, draft_expert_bytes=3e9, experts=8, experts_per_token=2)


@pytest.mark.parametrize(("batch", "length", "draft_length"), [(1, 256.0, 3), (8, 1000.0, 7), (64, 4096.0, 15)])
def test_paper_form(batch: int, length: float, draft_length: int) -> None:
    kv = 0.5 * 5e4 * batch * length
    compute = batch * (14e9 + length * 4e5) / 2e14
    target = max((15e9 + kv) / 1.5e12, compute) + 4e-5 * batch
    draft = max((1.3 * 5e9 + kv) / 1.5e12, compute) + 7e-5 * batch
    verify = max((15e9 + kv) / 1.5e12, (draft_length + 1) * compute) + 1.5e-4 * batch
    roofline = Roofline(CONSTANTS, PAPER)
    assert roofline.target_seconds(batch, length) == pytest.approx(target, rel=1e-12)
    assert roofline.draft_seconds(batch, length) == pytest.approx(draft, rel=1e-12)
    assert roofline.verify_seconds(batch, length, draft_length) == pytest.approx(verify, rel=1e-12)
    cycle = draft_length * draft + verify
    assert roofline.cycle_seconds(batch, length, draft_length) == pytest.approx(cycle, rel=1e-12)
    assert roofline.speedup(batch, length, 3.5, draft_length) == pytest.approx(3.5 * target / cycle, rel=1e-12)


def test_experts_are_read_as_tokens_touch_them() -> None:
    assert MOE.target_weight_traffic(1) == pytest.approx(3e9 + 12e9 * 2 / 8)
    assert MOE.draft_weight_traffic(1) == pytest.approx(2e9 + 3e9 * 2 / 8)
    assert MOE.target_weight_traffic(2) == pytest.approx(3e9 + 12e9 * (1 - (6 / 8) ** 2))
    assert MOE.target_weight_traffic(1000) == pytest.approx(15e9)
    # So verification of many tokens loads more than decoding does, though both are bound by memory.
    roofline = Roofline(MOE, replace(PAPER, F_eff=1e18, c_T=0.0, c_V=0.0))
    assert roofline.verify_seconds(1, 0.0, 7) > 1.9 * roofline.target_seconds(1, 0.0)
    assert CONSTANTS.target_weight_traffic(1) == CONSTANTS.target_weight_traffic(100) == 15e9


def test_further_terms() -> None:
    def change(**changes: float) -> list[float]:
        changed, plain = Roofline(CONSTANTS, replace(PAPER, **changes)), Roofline(CONSTANTS, PAPER)
        return [changed.seconds(mode, 4, 1000.0, 3) - plain.seconds(mode, 4, 1000.0, 3) for mode in MODES]

    assert change(sigma_V=1e-7) == pytest.approx([0, 0, 1e-4])
    assert change(t_T=1e-3) == pytest.approx([1e-3, 0, 0])
    assert change(t_D=1e-3) == pytest.approx([0, 1e-3, 0])
    assert change(t_V=1e-3) == pytest.approx([0, 0, 1e-3])
    kv = 0.5 * 5e4 * 1000.0 / 1.5e12
    assert change(kv_exponent=0.5) == pytest.approx([-2 * kv, -2 * kv, -2 * kv])
    compute = 4 * (14e9 + 1000.0 * 4e5) / 2e14
    assert change(overlap_loss=1.0) == pytest.approx([compute, compute, 4 * compute])
    attention = 4 * 1000.0 * 4e5 / 2e14
    added = change(overlap_loss=1.0, attention_cost=3.0, phi_D=2.0)
    assert added == pytest.approx(
        (compute + 2 * attention, compute + 2 * attention + 4 * 14e9 / 2e14, 4 * compute + 8 * attention)
    )
    padded = change(overlap_loss=1.0, tile=16, draft_tile=16)
    assert padded == pytest.approx([compute + 12 * 14e9 / 2e14, compute + 12 * 14e9 / 2e14, 4 * compute])


def test_rows_are_padded_to_tiles() -> None:
    assert [Roofline.padded_rows(rows, 1) for rows in (1, 7, 100)] == [1, 7, 100]
    assert [Roofline.padded_rows(rows, 8) for rows in (1, 8, 9)] == [8, 8, 16]
    assert [Roofline.padded_rows(rows, 128) for rows in (1, 16, 17, 64, 65, 128, 129, 300)] == [
        16, 16, 32, 64, 128, 128, 256, 384
    ]  # fmt: skip


def test_smooth_maximum() -> None:
    assert Roofline.smooth_maximum(3.0, 4.0, 0.0) == 4.0
    assert Roofline.smooth_maximum(3.0, 4.0, 0.5) == pytest.approx(5.0)
    assert Roofline.smooth_maximum(3.0, 4.0, 1.0) == pytest.approx(7.0)
    assert Roofline.smooth_maximum(0.0, 4.0, 0.5) == Roofline.smooth_maximum(4.0, 0.0, 0.5) == 4.0
    assert Roofline.smooth_maximum(1e-9, 1.0, 0.01) == 1.0  # the tiny ratio underflows and does no harm
