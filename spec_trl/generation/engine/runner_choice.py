"""Which runner a call gets: one with captured forwards, one whose layers are compiled, or the eager one."""

import torch
from transformers import PreTrainedModel

from ...native_code import compiler
from ..configuration import SpeculativeConfig
from ..session import Session, Shadow, Snapshot, addresses
from .cache import RaggedCache, autocast_dtype, pages_of
from .exactness import inexact_parts
from .graph_capture import SMALLEST_COLUMNS, CudaRecorder, GraphBudget, cache_rows
from .graph_runner import GraphRunner
from .linear_layers import make_copies, refresh_copies
from .memory import free_memory
from .pages import PagedCache
from .runner import EagerRunner, cpu_runner
from .shadow import make_shadow, not_exact
from .states import cache_for


def recorder_for(device: torch.device) -> CudaRecorder | None:
    """What captures forwards on `device`, or None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


def runner_mode(config: SpeculativeConfig, device: torch.device) -> str:
    """How forwards run on `device` under `config.runner`; raises ValueError where captured ones are asked for and
    `device` has none."""
    if recorder_for(device) is not None:
        return config.runner
    if config.runner == "graph":
        raise ValueError(
            f'runner="graph" captures CUDA graphs, and the model is on {device}. Move it to a CUDA device, or use '
            'runner="auto", "compiled" or "eager".'
        )
    is_compiled = config.runner != "eager" and device.type == "cpu" and compiler() is not None
    return "compiled" if is_compiled else "eager"


def exactness(model: PreTrainedModel, config: SpeculativeConfig, shadow: PreTrainedModel) -> bool | list[str] | None:
    """`SpeculationStatistics.exact` of generations of `model` by its `shadow`; raises ValueError where `config` asks
    for more. On a CPU it is tried. On CUDA, where `config` must ask for it, it is known of the kernels."""
    if config.exact is False or model.dtype == torch.float64:  # the last of 53 bits decides no token
        return None
    if recorder_for(model.device) is not None:
        found = not_exact(shadow) if config.exact is True else None
    elif model.device.type == "cpu":
        found = inexact_parts(model, cpu_runner if runner_mode(config, model.device) == "compiled" else EagerRunner)
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


def takes_pool(config: SpeculativeConfig, device: torch.device) -> bool:
    """Whether K/V lies in the pages of a pool: where forwards are captured, which need it at the same addresses."""
    return captures(config, device)


def runner_for(
    session: Session,
    model: PreTrainedModel,
    rows: int,
    columns: int,
    config: SpeculativeConfig,
    pages: int | None = None,
    graph_memory: float | None = None,
    exact: bool = False,
) -> EagerRunner:
    """A runner of `model`'s shadow, which never changes the model.

    The session's runner, with its cache and captured forwards, serves again while weights lie where they lay and it
    is large enough. A pool stays as large as it is, however much memory there is now.

    Args:
        session: of the call; the runner and the shadow stay in it.
        model: the target.
        rows: in flight, of `columns` tokens.
        columns: of a row, drafts included.
        config: its `runner` decides.
        pages: that memory holds, where K/V lies in the pages of a pool; None: all rows must have all their columns.
        graph_memory: bytes that captured forwards may take; None: `config.max_graph_memory`.
        exact: as of :func:`~spec_trl.generation.engine.shadow.make_shadow`. "auto" then compiles nothing: compiled
            layers round otherwise, and take the place of others while rows are in flight.

    Raises:
        ValueError: captured forwards are wanted on a device without them.
    """
    mode, recorder = runner_mode(config, model.device), recorder_for(model.device)
    if mode == "eager" or recorder is None:
        make = cpu_runner if mode == "compiled" else EagerRunner
        return make(shadow_for(session, model, exact), _cache_for(model, rows, columns, config, pages))
    mode = "graph" if exact and mode == "auto" else mode
    # Autocast decides in which dtype K/V is stored.
    made_for = (mode, exact, config.max_graph_memory, autocast_dtype(model.device), *addresses(model))
    graph_memory = config.max_graph_memory * 2**30 if graph_memory is None else graph_memory
    runner = session.runner
    if runner is not None:
        cache = runner.cache
        is_large = cache.rows >= rows and cache.columns >= columns
        if pages is None and isinstance(cache, PagedCache):
            is_large = is_large and cache.pages.count >= rows * pages_of(columns)
        if runner.made_for == made_for and is_large:
            runner.begin()
            runner.budget.limit = graph_memory
            refresh_copies(runner.network)
            return runner
        del cache, runner
        session.drop_runner()  # its memory goes before more is asked for
    columns = -(-columns // SMALLEST_COLUMNS) * SMALLEST_COLUMNS
    cache = _cache_for(model, cache_rows(rows), columns, config, pages)
    budget = GraphBudget(recorder, graph_memory)
    network = shadow_for(session, model, exact)
    session.shadow = None  # what captures leave on it is the runner's alone
    session.runner = GraphRunner(network, cache, budget, mode, made_for)
    return session.runner


def shadow_for(session: Session, model: PreTrainedModel, exact: bool = False) -> PreTrainedModel:
    """The shadow of `model` in the session, or a new one, with copies of wide weights where autocast is on."""
    is_cast = autocast_dtype(model.device) is not None
    if session.shadow is not None and session.shadow.exact == exact and not is_cast:
        return session.shadow.network
    network = make_shadow(model, exact)
    make_copies(network)
    may_stay = session.snapshot is not None and session.snapshot.is_complete and not is_cast
    session.shadow = Shadow(network, exact, Snapshot(network)) if may_stay else None
    return network


def _cache_for(
    model: PreTrainedModel, rows: int, columns: int, config: SpeculativeConfig, pages: int | None
) -> RaggedCache:
    if takes_pool(config, model.device):
        return PagedCache.with_pages(model, rows, columns, pages)
    return cache_for(model, rows, columns)


def free_for_cache(session: Session, device: torch.device) -> int:
    """Bytes on `device` that are free, or that the session's runner takes, with its cache and captured forwards."""
    return free_memory(device) + (0 if session.runner is None else session.runner.held_bytes)
