"""γ follows τ as in ER Algorithm 1 and App. G.3."""

import pytest

from spec_trl.papers.efficient_rollout.draft_length import DraftLengthController, convert_block_efficiency


def schedule(taus: list[float], **options: object) -> list[int]:
    """γ in force in each rollout, and after the last one."""
    controller = DraftLengthController(**options)  # type: ignore[arg-type]
    lengths = [controller.draft_length]
    for tau in taus:
        controller.observe(tau)
        lengths.append(controller.draft_length)
    return lengths


def moves(lengths: list[int]) -> list[int]:
    return [b for a, b in zip([0, *lengths], lengths, strict=False) if a != b]


# App. G.3: before each elevation τ reaches 5.73, 7.60, 9.48; after it, it is 7.37, 9.35, 11.25.
@pytest.mark.parametrize(
    ("taus", "lengths"),
    [
        ([5.2, 5.5, 5.73, 5.73, 7.37, 7.5, 7.6, 7.6, 9.35, 9.4, 9.48, 9.48, *[11.25] * 6], [5, 7, 9, 11]),
        ([5.2, 5.5, 5.73, 5.73, 7.37, 7.5, 7.61, 7.61, *[9.3] * 6], [5, 7, 9]),
        ([5.07, 5.2, 5.3, 5.4, 5.5, 5.5], [5]),
        ([1.0] * 5, [5]),
    ],
    ids=["qwen 7b", "qwen 14b", "llama", "bottom"],
)
def test_the_papers_schedules(taus: list[float], lengths: list[int]) -> None:
    assert moves(schedule(taus)) == lengths


def test_thresholds_count_as_reached() -> None:
    assert schedule([5.7, 5.7])[-1] == 7  # 1 + 5 · 0.94
    assert schedule([5.69, 5.7, 5.69, 5.7])[-1] == 5
    assert schedule([6.95, 6.95], initial=7)[-1] == 5  # 1 + 7 · 0.85
    assert schedule([6.95, 6.96, 6.95], initial=7)[-1] == 7


def test_a_condition_must_hold_for_the_whole_window_which_starts_anew_after_a_move() -> None:
    for patience in (1, 3):
        assert moves(schedule([5.9] * patience, patience=patience)) == [5, 7]
        interrupted = [5.9] * (patience - 1) + [5.3] + [5.9] * (patience - 1)
        assert moves(schedule(interrupted, patience=patience)) == [5]
    # 6.0 is the ceiling at γ = 5 and below the lower threshold at γ = 7: kept in the window it would undo the move.
    assert schedule([6.0, 6.0, 6.0, 7.3, 6.0, 6.0]) == [5, 5, 7, 7, 7, 7, 5]
    assert moves(schedule([12.0] * 5, initial=11)) == [11]
    assert moves(schedule([4.0] * 9, draft_lengths=[3])) == [3]


def test_tau_prev_starts_at_gamma_and_follows_what_was_measured() -> None:
    controller = DraftLengthController()
    assert controller.block_efficiency == 5.0
    controller.observe(5.8)
    assert controller.block_efficiency == 5.8
    before = controller.state_dict()
    controller.observe(None)  # a rollout that never speculated
    assert controller.state_dict() == before
    controller.observe(5.8)
    assert controller.draft_length == 7


# Design §7: from τ before each elevation, what is measured after it (App. G.3: 7.37, 9.35, 11.25).
@pytest.mark.parametrize(
    ("tau", "old", "new", "expected"), [(5.73, 5, 7, 7.50), (7.60, 7, 9, 9.36), (9.48, 9, 11, 11.24)]
)
def test_conversion_to_another_draft_length(tau: float, old: int, new: int, expected: float) -> None:
    assert convert_block_efficiency(tau, old, new) == pytest.approx(expected, abs=0.01)
    controller = DraftLengthController(initial=old, patience=1)
    controller.observe(tau)
    assert controller.draft_length == new
    assert controller.block_efficiency == pytest.approx(expected, abs=0.01)


def test_state_goes_through_a_checkpoint() -> None:
    taus = [5.8, 5.8, 7.2, 7.7, 7.7, 9.0]
    whole = schedule(taus)
    for cut in range(len(taus)):
        first, second = DraftLengthController(), DraftLengthController()
        for number, tau in enumerate(taus):
            (first if number < cut else second).observe(tau)
            if number == cut - 1:
                second.load_state_dict(first.state_dict())
                assert second.block_efficiency == first.block_efficiency
        assert second.draft_length == whole[-1]
    controller = DraftLengthController(draft_lengths=[2, 4])  # another ladder starts over
    controller.load_state_dict({"draft_length": 5, "block_efficiency": 5.8, "window": [5.8]})
    assert (controller.draft_length, controller.block_efficiency) == (2, 2.0)
