"""SA Algorithm 3."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.papers.specactor.assignment import greedy_assignments


def test_algorithm_3_by_hand() -> None:
    """Methods x and y, b_max = 2. Worker 0 has the initial method x for all of p, q, r; worker 1 was freed earlier and
    has y for r, with one place left; 2 and 3 are freed now, 2 from method y, where it had p."""
    added = greedy_assignments(
        requests={"p": 0.5, "q": 0.2, "r": 0.3},
        methods=["x", "y"],
        freed=[2, 3],
        workers_of={"x": [0], "y": [1, 2]},
        load={0: 3, 1: 1, 2: 1},
        max_batch=2,
        ladder_order=["y", "x"],
        assigned={("p", "x"): 0, ("q", "x"): 0, ("r", "x"): 0, ("r", "y"): 1, ("p", "y"): 2},
    )
    # Lines 1-3: 2 leaves y, so x and y have one worker each: the ladder gives it to y; then 3 goes to x.
    # Lines 4-10: all have x already. y: q, the slowest, takes the place at 1; r has y; p goes to 2, where it was void.
    assert added == {("q", "y"): 1, ("p", "y"): 2}


def test_algorithm_3_spreads_workers_evenly() -> None:
    requests = {n: n / 100 for n in range(50)}
    added = greedy_assignments(requests, ["x", "y", "z"], range(8), {"z": ["w"]}, {"w": 0}, 5, ["z", "y", "x"], {})
    workers = {m: {w for (_, method), w in added.items() if method == m} for m in "xyz"}
    assert {m: len(found) for m, found in workers.items()} == {"x": 3, "y": 3, "z": 3}
    assert workers["y"] == {0, 3, 6}  # y and x have fewer than z, and y is the better one


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `greedy_assignments` whose loads are those of its assignments."""
    methods = [f"m{n}" for n in range(draw(st.integers(1, 4)))]
    method_of = dict(enumerate(draw(st.lists(st.sampled_from([None, *methods]), min_size=1, max_size=8))))
    acceptances = draw(st.lists(st.sampled_from([0.1, 0.4, 0.7]) | st.floats(0, 1), max_size=10))
    requests = {f"r{n}": acceptance for n, acceptance in enumerate(acceptances)}
    max_batch, load, assigned = draw(st.integers(1, 4)), Counter[int](), dict[tuple[str, str], int]()
    for worker, method in method_of.items():
        for request in draw(st.lists(st.sampled_from(sorted(requests)), max_size=max_batch)) if requests else ():
            if method and (request, method) not in assigned:
                assigned[request, method] = worker
                load[worker] += 1
    return {
        "requests": requests,
        "methods": methods,
        "freed": [worker for worker, method in method_of.items() if method is None or draw(st.booleans())],
        "workers_of": {m: [w for w, method in method_of.items() if method == m] for m in methods},
        "load": load,
        "max_batch": max_batch,
        "ladder_order": draw(st.permutations(methods)),
        "assigned": assigned,
    }


@settings(deadline=None, max_examples=60, derandomize=True)
@given(clusters())
def test_algorithm_3_properties(cluster: dict[str, Any]) -> None:
    requests, freed, assigned = cluster["requests"], set(cluster["freed"]), cluster["assigned"]
    added = greedy_assignments(**cluster)
    standing = {pair for pair, worker in assigned.items() if worker not in freed}
    assert not standing & set(added)
    load = Counter({w: n for w, n in cluster["load"].items() if w not in freed}) + Counter(added.values())
    assert all(count <= cluster["max_batch"] for count in load.values())
    of_worker: dict[int, set[str]] = {}
    for (_, method), worker in added.items():
        of_worker.setdefault(worker, set()).add(method)
        assert worker in freed or worker in cluster["workers_of"][method]
    assert all(len(methods) == 1 for methods in of_worker.values())
    for method in cluster["methods"]:  # whoever went without is no slower than anyone who got the method
        served = [requests[r] for r, m in added if m == method]
        left = [requests[r] for r in requests if (r, method) not in added and (r, method) not in standing]
        assert not served or not left or max(served) <= min(left)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"methods": []}, "methods"), ({"ladder_order": ["x"]}, "ladder_order=.*'y'"), ({"max_batch": 0}, "max_batch=0")],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict(requests={}, methods="xy", freed=[], workers_of={}, load={}, assigned={})
    with pytest.raises(ValueError, match=f"{message}.*(name|rank|must)"):
        greedy_assignments(**(arguments | dict(max_batch=1, ladder_order="xy") | changes))
