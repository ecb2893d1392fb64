"""Chooses the runner of a call: captured forwards, C++ on a CPU, or eager; reuses the session's runner."""

from functools import partial

import torch
from transformers import PreTrainedModel

from ....native.native_code import compiler
from ...options import SpeculativeConfig
from ...session import Session, Shadow
from ..cuda.graph_capture import SMALLEST_COLUMNS, CudaRecorder, GraphBudget, cache_rows
from ..cuda.graph_runner import GraphRunner
from ..kv.base import Capacity, KVCache, pages_of
from ..kv.cache import autocast_dtype
from ..kv.memory import free_memory
from ..kv.pages import PagedCache
from ..network.family import Family
from ..network.products import make_copies, refresh_copies
from ..network.shadow import make_shadow
from ..network.snapshot import Snapshot, addresses
from .cpu_runner import cpu_runner
from .exactness import inexact_parts, unordered_sums
from .runner import EagerRunner


def recorder_for(device: torch.device) -> CudaRecorder | None:
    """Makes the recorder that captures forwards on `device`, or returns None."""
    return CudaRecorder(device) if device.type == "cuda" else None


def runner_mode(config: SpeculativeConfig, device: torch.device) -> str:
    """Returns how forwards run on `device` under `config.runner`."""
    if recorder_for(device) is not None:
        return config.runner
    is_compiled = config.runner != "eager" and device.type == "cpu" and compiler() is not None
    return "compiled" if is_compiled else "eager"


def exactness(
    snapshot: Snapshot, model: PreTrainedModel, config: SpeculativeConfig
) -> bool | list[str] | None:
    """`SpeculationStatistics.exact` of generations of `model`; raises ValueError where `config` asks for more. It is
    tried, once for each `snapshot` of `model`; on CUDA where `config` asks for it."""
    if config.exact is False or model.dtype == torch.float64:  # rounding of float64 decides no token
        return None
    if recorder_for(model.device) is not None:
        key = f"sums {autocast_dtype(model.device)}"
        found = snapshot.find(key, partial(unordered_sums, model)) if config.exact is True else None
    elif model.device.type == "cpu":
        make = cpu_runner if runner_mode(config, model.device) == "compiled" else EagerRunner
        settings = f"exact {make.__name__} {torch.get_num_threads()} {autocast_dtype(model.device)}"
        found = snapshot.find(settings, partial(inexact_parts, model, make, settings))
    else:
        found = ["its device"] if config.exact is True else None
    if found and config.exact is True:
        raise ValueError(
            f"exact=True is asked for, and {type(model).__name__} is not exact on this machine: {'; '.join(found)}. "
            'Set exact="auto" to generate all the same, with drafts that may change a token at a near-tie.'
        )
    return None if found is None else found or True


def captures(config: SpeculativeConfig, device: torch.device) -> bool:
    """Whether forwards are captured on `device`, and have to be freed."""
    return recorder_for(device) is not None and config.runner != "eager"


def takes_pool(config: SpeculativeConfig, device: torch.device, family: Family) -> bool:
    """Whether K/V lies in the pages of a pool: where forwards are captured, which need it at the same addresses."""
    return captures(config, device) and family.takes_pages


def runner_for(
    session: Session,
    model: PreTrainedModel,
    family: Family,
    config: SpeculativeConfig,
    capacity: Capacity,
    exact: bool = False,
    offsets: bool = False,
) -> EagerRunner:
    """Returns a runner of `model`'s shadow; the model never changes.

    The session's runner, with its cache and captured forwards, is reused if weights have the same addresses and it is
    large enough. Its pool of pages keeps its size, however much memory is free.

    Args:
        session: of the call; the runner and the shadow stay in it.
        model: the target.
        family: of the model.
        config: its `runner` decides.
        capacity: memory. Without a number of pages a pool has pages for all columns of all rows; without bytes for
            captured forwards they are `config.max_graph_memory`.
        exact: as of :func:`~.make_shadow`. "auto" then compiles nothing: compiled
            layers round differently, and would replace others while rows are in flight.
        offsets: whether positions of some rows are not their columns (`KVCache.offsets`).

    Raises:
        ValueError: captured forwards are wanted on a device without them.
    """
    rows, columns, pages = capacity.rows, capacity.columns, capacity.pages
    mode, recorder = runner_mode(config, model.device), recorder_for(model.device)
    if mode == "eager" or recorder is None:
        make = cpu_runner if mode == "compiled" else EagerRunner
        network = shadow_for(session, model, exact)
        if takes_pool(config, model.device, family):
            cache: KVCache = PagedCache.with_pages(model, rows, columns, pages)
        else:
            cache = family.cache.for_network(model, rows, columns)
        return make(network, cache.with_offsets(model.device) if offsets else cache)
    mode = "graph" if not family.is_compiled or (exact and mode == "auto") else mode
    # Autocast sets the dtype of K/V.
    made_for = (mode, exact, config.max_graph_memory, autocast_dtype(model.device), *addresses(model))
    graph_memory = config.max_graph_memory * 2**30 if capacity.graphs is None else capacity.graphs
    runner = session.runner
    if runner is not None:
        cache = runner.cache
        is_large = cache.rows >= rows and cache.columns >= columns
        is_large = is_large and (cache.offsets is not None or not offsets)
        if pages is None and isinstance(cache, PagedCache):
            is_large = is_large and cache.pages.count >= rows * pages_of(columns)
        if runner.made_for == made_for and is_large:
            runner.begin()
            runner.budget.limit = graph_memory
            refresh_copies(runner.network)
            return runner
        del cache, runner
        session.drop_runner()  # frees its memory before allocating
    columns = -(-columns // SMALLEST_COLUMNS) * SMALLEST_COLUMNS
    if family.takes_pages:
        cache = PagedCache.with_pages(model, cache_rows(rows), columns, pages)
    else:
        cache = family.cache.for_network(model, rows, columns)  # all of its memory is taken, and counted, at once
    if offsets:
        cache.with_offsets(model.device)
    budget = GraphBudget(recorder, graph_memory)
    network = shadow_for(session, model, exact)
    session.shadow = None  # captures leave changes on it that belong to the runner
    session.runner = GraphRunner(network, cache, budget, mode, made_for)
    return session.runner


def shadow_for(session: Session, model: PreTrainedModel, exact: bool = False) -> PreTrainedModel:
    """Returns the shadow of `model` in the session, or a new one, with copies of wide weights under autocast."""
    is_cast = autocast_dtype(model.device) is not None
    if session.shadow is not None and session.shadow.exact == exact and not is_cast:
        return session.shadow.network
    network = make_shadow(model, exact)
    make_copies(network)
    may_stay = session.snapshot is not None and session.snapshot.is_complete and not is_cast
    session.shadow = Shadow(network, exact, Snapshot(network)) if may_stay else None
    return network


def free_for_cache(session: Session, device: torch.device) -> int:
    """Free bytes on `device`, plus those of the session's runner with its cache and captured forwards."""
    return free_memory(device) + (0 if session.runner is None else session.runner.held_bytes)
