"""Which runner a call gets, and the one that is kept for the next call."""

import gc

import torch
from torch import nn
from transformers import PreTrainedModel

from ...native_code import compiler
from .. import kept
from ..configuration import SpeculativeConfig
from .cache import RaggedCache, autocast_dtype, pages_of
from .captured import GraphRunner
from .cuda_graphs import SMALLEST_COLUMNS, CudaRecorder, GraphBudget, cache_rows
from .exactness import inexact_parts
from .linear_layers import make_copies, refresh_copies
from .memory import free_memory
from .pages import PagedCache
from .runner import EagerRunner, cpu_runner
from .shadow import fingerprint, make_shadow, not_exact
from .snapshot import is_unchanged, snapshot_of


_SHADOW, _MADE_OF = "shadow", "snapshot of the policy, exact"


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
    model: PreTrainedModel,
    rows: int,
    columns: int,
    config: SpeculativeConfig,
    pages: int | None = None,
    graph_memory: float | None = None,
    exact: bool = False,
) -> EagerRunner:
    """A runner of `model`'s shadow, which never changes the model.

    One with captured forwards serves one call at a time. :func:`keep_runner` keeps it, with its cache, for the next,
    until the model dies, changes (other modules, hooks or weight tensors; the values of the weights may change) or
    needs more room. A pool that is kept stays as large as it is, however much memory there is now.

    Args:
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
        if recorder is None:  # it may have been on another device
            kept.take(model, kept.RUNNER)
        make = cpu_runner if mode == "compiled" else EagerRunner
        return make(shadow_to_run(model, exact), _cache_for(model, rows, columns, config, pages))
    mode = "graph" if exact and mode == "auto" else mode
    # Autocast decides in which dtype K/V is stored.
    made_for = (mode, exact, config.max_graph_memory, autocast_dtype(model.device), *fingerprint(model))
    graph_memory = config.max_graph_memory * 2**30 if graph_memory is None else graph_memory
    runner: GraphRunner | None = kept.take(model, kept.RUNNER)
    if runner is not None:
        cache = runner.cache
        has_room = cache.rows >= rows and cache.columns >= columns
        if pages is None and isinstance(cache, PagedCache):
            has_room = has_room and cache.pages.count >= rows * pages_of(columns)
        if runner.made_for == made_for and has_room:
            runner.begin()
            runner.budget.limit = graph_memory
            refresh_copies(runner.network)
            return runner
        del cache, runner
        gc.collect()  # captured forwards and their runner hold each other: the memory goes before more is asked for
    columns = -(-columns // SMALLEST_COLUMNS) * SMALLEST_COLUMNS
    cache = _cache_for(model, cache_rows(rows), columns, config, pages)
    budget = GraphBudget(recorder, graph_memory)
    return GraphRunner(shadow_to_run(model, exact), cache, budget, mode, made_for)


def shadow_to_run(model: PreTrainedModel, exact: bool = False) -> PreTrainedModel:
    """A shadow of `model` for a generation, with copies of wide weights where autocast is on; else the one that is
    kept while `model` is unchanged (:func:`keep_shadow`)."""
    snapshot = snapshot_of(model)
    made_of = snapshot, exact
    may_stay = snapshot.is_complete and autocast_dtype(model.device) is None
    shadow: PreTrainedModel | None = kept.take(model, _SHADOW) if may_stay else None
    if shadow is None or kept.look(shadow, _MADE_OF) != made_of:
        shadow = make_shadow(model, exact)
        make_copies(shadow)
        if may_stay:
            kept.keep(shadow, _MADE_OF, made_of)
            snapshot_of(shadow)
    return shadow


def keep_shadow(model: PreTrainedModel, shadow: PreTrainedModel) -> None:
    """Keeps what :func:`shadow_to_run` gave to a call that ended well, unless the call has left something on it."""
    if kept.look(shadow, _MADE_OF) is not None and is_unchanged(shadow):
        kept.keep(model, _SHADOW, shadow)


def _cache_for(
    model: PreTrainedModel, rows: int, columns: int, config: SpeculativeConfig, pages: int | None
) -> RaggedCache:
    if takes_pool(config, model.device):
        return PagedCache.with_pages(model, rows, columns, pages)
    return RaggedCache.for_network(model, rows, columns)


def free_for_cache(model: PreTrainedModel) -> int:
    """Bytes that caches may take, or those that are kept for the next call, and captured forwards, take already."""
    runner: GraphRunner | None = kept.look(model, kept.RUNNER)
    return free_memory(model.device) + (0 if runner is None else runner.held_bytes)


def kept_runner(model: nn.Module) -> GraphRunner | None:
    """The runner that is kept for the next call of `model`, also if it is wrapped; it stays."""
    found = (kept.look(module, kept.RUNNER) for module in model.modules())
    return next((runner for runner in found if runner is not None), None)


def drop_runner(model: nn.Module) -> None:
    """Frees what :func:`kept_runner` finds."""
    for module in model.modules():
        kept.take(module, kept.RUNNER)
    gc.collect()  # captured forwards and their runner hold each other


def keep_runner(model: PreTrainedModel, runner: GraphRunner) -> None:
    """Keeps what a runner of :func:`runner_for` captured, after a call that ended well, for the next one."""
    replaced = kept.take(model, kept.RUNNER)  # of a call that ran at the same time
    kept.keep(model, kept.RUNNER, runner)
    if replaced is not None:
        del replaced
        gc.collect()
