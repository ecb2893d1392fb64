"""Runs `spec-trl simulate`: seconds of a rollout on a described cluster, by method (SA §5, Fig. 14)."""

import argparse
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]
from tqdm import tqdm

from ....cli.arguments import table
from ....json_files import from_json
from ..cluster import Cluster
from ..simulator import Method, Outcome, simulate


if TYPE_CHECKING:
    from ....cli.plotting import Box, Drawing

WORKERS = 5
"""Lanes of a panel, as in the paper: the worker that is free first, and those that decode longest."""
_MOST_BYTES = 1_000_000
_MOST_LEVELS = 20


class _Loader(yaml.SafeLoader):
    """Reads 1e-2 as a number, as in YAML 1.2; in PyYAML's YAML 1.1 only 1.0e-2 is one. Raises ValueError at aliases, a
    few lines of which can expand to gigabytes, and at deep nesting."""

    levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*name), which is not served; write out the part that it repeats")
        self.levels += 1
        if self.levels > _MOST_LEVELS:
            raise ValueError(f"it has more than {_MOST_LEVELS} levels of nesting, a cluster has 3; mend its brackets")
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), "-+.0123456789"
)


def run(arguments: argparse.Namespace) -> None:
    cluster = read_cluster(arguments.cluster)
    outcomes = {}
    for method in tqdm(methods_for(cluster), "simulating", delay=2, leave=False):
        outcomes[method.name] = simulate(cluster, method, arguments.seed)
    print(f"{cluster.name}: {cluster.requests} requests on {cluster.gpus} GPUs, {cluster.worker_gpus} per worker")
    print(as_table(outcomes))
    if arguments.output is not None:
        drawing = workers_over_time(outcomes)
        drawing.figure.savefig(arguments.output)
        print(f"{arguments.output}: {drawing.text}")


def read_cluster(path: Path) -> Cluster:
    """The cluster that a YAML file describes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no YAML, or a field is missing, unknown or out of range; names file and field.
    """
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; a cluster has at most {_MOST_BYTES:,}. Name another file.")
    try:
        return from_json(json.dumps(yaml.load(path.read_text(), _Loader)), Cluster)
    except (TypeError, ValueError, yaml.YAMLError) as error:  # TypeError: YAML has dates, JSON has none
        raise ValueError(f"{path} is not a valid cluster: {error}; examples/clusters has two.") from None


def methods_for(cluster: Cluster) -> list[Method]:
    """The methods of SA §5, and a shared pool. Every drafter has a coupled baseline; other methods with one drafter
    take the first. If one worker takes all GPUs, no method has separate GPUs for drafters."""
    names = tuple(drafter.name for drafter in cluster.drafters)
    first = names[:1]
    methods = [
        Method("plain"),
        Method("plain, preparing meanwhile", overlap=True),
        Method("plain, 2× the GPUs", gpus=2),
        *(Method(f"coupled, {name}", "coupled", (name,)) for name in names),
        Method("disaggregated", "disaggregated", first),
        Method("decoupled", "decoupled", first),
        Method("+ reconfiguration", "decoupled", first, reconfigure=True),
        Method("+ best of N", "decoupled", names, reconfigure=True, best_of_n=True),
        Method("+ shared pool", "decoupled", names, reconfigure=True, best_of_n=True, shared_pool=True),
    ]
    one_worker = cluster.gpus == cluster.worker_gpus
    return [method for method in methods if not one_worker or method.execution in ("plain", "coupled")]


def as_table(outcomes: Mapping[str, Outcome]) -> str:
    """One line per method, with its plan, and its times next to those of the first method."""
    base = next(iter(outcomes.values()))
    rows = []
    for name, outcome in outcomes.items():
        plan = outcome.plan
        layout = f"{plan.draft_gpus}+{plan.verify_gpus}" if plan.draft_gpus else str(plan.verify_gpus)
        rows.append(
            [name, outcome.drafter or "", layout, str(plan.batch), str(plan.window or ""),
             f"{outcome.rollout_seconds:.1f}", f"{base.rollout_seconds / outcome.rollout_seconds:.2f}",
             f"{base.step_seconds / outcome.step_seconds:.2f}", f"{outcome.idle_share:.0%}"]
        )  # fmt: skip
    head = ["method", "drafter", "GPUs", "batch", "w", "rollout s", "rollout ×", "step ×", "idle"]
    return table(head, rows)


def workers_over_time(outcomes: Mapping[str, Outcome]) -> "Drawing":
    """One panel per method, one lane per worker: a colour per drafter, nothing where the worker idles (SA Fig.
    14)."""
    # matplotlib takes a second to import, and only figures need it.
    from ....cli.plotting import BLUE, GREEN, ORANGE, PALE, PURPLE, SKY, VERMILLION, Drawing, canvas, draw_boxes

    labels = [("seconds since the rollout's start", "workers")] * len(outcomes)
    figure, panels = canvas(*labels, per_row=3, width=4.2, height=2.2)
    longest = max(outcome.rollout_seconds for outcome in outcomes.values())
    drafters = sorted({name for outcome in outcomes.values() for spans in outcome.spans for _, _, name in spans})
    colours = dict(zip(drafters, itertools.cycle((BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)), strict=False))
    colours["none"] = PALE
    for axes, (name, outcome) in zip(panels, outcomes.items(), strict=True):
        by_end = sorted(outcome.spans, key=lambda spans: spans[0][1] if spans else 0.0)
        lanes = [by_end[0], *by_end[1:][-(WORKERS - 1) :]]
        boxes: list[tuple[str, Box]] = []
        for place, spans in enumerate(lanes):
            boxes += [(drafter, (start, end, place - 0.4, place + 0.4)) for start, end, drafter in spans]
        legend = {drafter: colours[drafter] for drafter, _ in boxes}
        draw_boxes(axes, [(colours[drafter], box) for drafter, box in boxes], legend)
        axes.set(title=name, xlim=(0, longest), ylim=(len(lanes) - 0.5, -0.5), yticks=[])
    ends = ", ".join(f"{name} {outcome.rollout_seconds:.0f} s" for name, outcome in outcomes.items())
    return Drawing(figure, f"the last request ends after: {ends}.")
