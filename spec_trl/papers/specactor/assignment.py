"""Assigns further drafters to slow requests (SA §4.2, Algorithm 3)."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar


Request = TypeVar("Request", bound=Hashable)
Worker = TypeVar("Worker", bound=Hashable)


def greedy_assignments(
    requests: Mapping[Request, float],
    methods: Sequence[str],
    freed: Sequence[Worker],
    workers_of: Mapping[str, Sequence[Worker]],
    load: Mapping[Worker, int],
    max_batch: int,
    ladder_order: Sequence[str],
    assigned: Mapping[tuple[Request, str], Worker],
) -> dict[tuple[Request, str], Worker]:
    """SA Algorithm 3: gives freed workers to methods, then the slowest requests to workers.

    A freed worker leaves its old method and requests for the method with the fewest workers; among equals for the
    better one on the ladder. A method then takes requests in ascending acceptance (depth first).

    Args:
        requests: the active requests (R) with their acceptance; among equals the first comes first.
        methods: candidates (D).
        freed: workers without requests (W).
        workers_of: W_d before this call.
        load: number of requests by worker of `workers_of`.
        max_batch: b_max, requests that one worker verifies at a time.
        ladder_order: all of `methods`, best first.
        assigned: worker by (request, method), initial methods included; these pairs are not assigned again.

    Returns:
        M, the worker by added (request, method).

    Raises:
        ValueError: `methods` is empty, `ladder_order` lacks one of them, or `max_batch` is less than 1.
    """
    if not methods:
        raise ValueError("methods is empty; name at least one that free workers can take.")
    if missing := [method for method in methods if method not in ladder_order]:
        raise ValueError(f"ladder_order={list(ladder_order)} lacks {missing}; rank all of methods.")
    if max_batch < 1:
        raise ValueError(f"max_batch={max_batch} is out of range; it must be at least 1.")
    free = set(freed)
    workers = {method: [worker for worker in workers_of.get(method, ()) if worker not in free] for method in methods}
    loads = Counter({worker: count for worker, count in load.items() if worker not in free})
    taken = {pair for pair, worker in assigned.items() if worker not in free}
    for worker in freed:  # lines 1-3
        fewest = min(methods, key=lambda method: (len(workers[method]), ladder_order.index(method)))
        workers[fewest].append(worker)
    slowest_first = sorted(requests, key=requests.__getitem__)
    added = {}
    for method in methods:  # lines 4-10
        candidates = iter([request for request in slowest_first if (request, method) not in taken])
        for worker in workers[method]:
            while loads[worker] < max_batch and (request := next(candidates, None)) is not None:
                added[request, method] = worker
                loads[worker] += 1
    return added


def further_method(
    requests: Mapping[Request, float], methods: Sequence[str], present: str, helpers: Mapping[tuple[Request, str], int]
) -> tuple[str, list[Request]] | None:
    """Runs Algorithm 3 for one freed worker, on the worker that has the requests.

    Args:
        requests: with their acceptance.
        methods: candidates, the best one on the ladder first.
        present: the method that drafts for the requests here.
        helpers: the worker by (request, method) assigned before.

    Returns:
        The freed worker's method and its requests, the slowest first; None: no request needs the worker.
    """
    here, freed = -1, -2
    workers = {name: sorted({worker for (_, other), worker in helpers.items() if other == name}) for name in methods}
    if present in workers:
        workers[present].append(here)
    load = Counter(helpers.values()) + Counter({here: len(requests)})
    assigned = {**helpers, **{(request, present): here for request in requests}}
    added = greedy_assignments(requests, methods, [freed], workers, load, len(requests), methods, assigned)
    pairs = [pair for pair, worker in added.items() if worker == freed]
    return (pairs[0][1], [request for request, _ in pairs]) if pairs else None
