"""SpecActor's Fig. 11 and 13 by simulation, next to what the paper says, and Fig. 14 (SA §5.2, §5.4, §5.5).

Each trace is a file in `examples/clusters`, which states every assumption: the paper gives the GPUs, the requests, the
longest response, and one latency ("lower than 13 ms"), all else is ours. None differs between methods or traces.

    python -m benchmarks.paper.specactor --output benchmarks/results/specactor.json --figure workers.png
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from spec_trl.cli.arguments import figure_file, table, whole_number
from spec_trl.papers.specactor.cluster import Cluster
from spec_trl.papers.specactor.commands.simulate import as_table, methods_for, read_cluster, workers_over_time
from spec_trl.papers.specactor.simulator import Method, Outcome, simulate

from ..measure import Finding, Options, begin, spread, write_result


CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
TRACES = {"GRPO-32B-20K": "grpo-32b-20k.yaml", "DAPO-32B-20K": "dapo-32b-20k.yaml"}
NAMES = {
    "plain": "veRL",
    "plain, preparing meanwhile": "RLHFuse",
    "plain, 2× the GPUs": "veRL 2×",
    "coupled, Qwen2.5-0.5B": "VanillaSpec",
    "coupled, n-gram": "n-gram",
}
"""The paper's names of its baselines, by those of `methods_for`."""
BASELINES = list(NAMES.values())
SPECACTOR = "+ best of N"


class Claim(NamedTuple):
    """What the paper says, and what the simulation gives."""

    what: str
    low: float
    high: float
    simulated: float

    @property
    def deviation(self) -> float:
        """Of the simulated number from the nearer end of the paper's range, as a share of that."""
        nearest = min(max(self.simulated, self.low), self.high)
        return self.simulated / nearest - 1


def claims(trace: str, outcomes: Mapping[str, Outcome]) -> list[Claim]:
    """Those of SA §2.2, §5.2 and, for DAPO-32B-20K, §5.4."""

    def rollout(faster: str, slower: str) -> float:
        return outcomes[slower].rollout_seconds / outcomes[faster].rollout_seconds

    def step(faster: str, slower: str) -> float:
        return outcomes[slower].step_seconds / outcomes[faster].step_seconds

    best = min(BASELINES, key=lambda name: outcomes[name].step_seconds)
    others = [name for name in BASELINES if name != best]
    found = [
        Claim("rollout, SpecActor over veRL", 2.0, 2.4, rollout(SPECACTOR, "veRL")),
        Claim("rollout, SpecActor over veRL 2×", 1.8, 2.3, rollout(SPECACTOR, "veRL 2×")),
        Claim("rollout, SpecActor over VanillaSpec", 1.7, 2.0, rollout(SPECACTOR, "VanillaSpec")),
        Claim("rollout, SpecActor over n-gram", 1.7, 2.0, rollout(SPECACTOR, "n-gram")),
        Claim("step, SpecActor over the best baseline", 1.3, 1.3, step(SPECACTOR, best)),
        Claim("step, SpecActor over the others", 1.5, 1.7, fmean(step(SPECACTOR, name) for name in others)),
        Claim("step, RLHFuse over veRL", 1.03, 1.03, step("RLHFuse", "veRL")),
        Claim("idle share of veRL's workers", 0.5, 0.5, outcomes["veRL"].idle_share),
    ]
    if trace.startswith("DAPO"):
        found += [
            Claim("Fig. 13: VanillaSpec over veRL", 1.026, 1.026, rollout("VanillaSpec", "veRL")),
            Claim("Fig. 13: disaggregated over veRL", 0.75, 0.75, rollout("disaggregated", "veRL")),
            Claim("Fig. 13: decoupled over VanillaSpec", 1.3, 1.3, rollout("decoupled", "VanillaSpec")),
            Claim("Fig. 13: + reconfiguration", 1.2, 1.2, rollout("+ reconfiguration", "decoupled")),
            Claim("Fig. 13: + best of N", 1.2, 1.2, rollout("+ best of N", "+ reconfiguration")),
        ]
    found.append(Claim("beyond the paper: + shared pool", 1.0, 1.0, rollout("+ shared pool", "+ best of N")))
    return found


def paper_methods(cluster: Cluster) -> dict[str, Method]:
    """Those of `spec-trl simulate` by the paper's names, without the coupled one that the paper does not have."""
    return {
        NAMES.get(method.name, method.name): method
        for method in methods_for(cluster)
        if method.execution != "coupled" or method.name in NAMES
    }


def simulate_all(cluster: Cluster, seed: int) -> dict[str, Outcome]:
    """One step by each method."""
    return {name: simulate(cluster, method, seed) for name, method in paper_methods(cluster).items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "specactor", "--seeds 1")
    parser.add_argument("--seeds", type=whole_number, default=5, help="draws of lengths and acceptance")
    parser.add_argument("--figure", type=figure_file, help="Fig. 14 for DAPO-32B-20K, of the first draw")
    options = parser.read(arguments)
    machine = begin(options)
    findings = []
    for trace, file in TRACES.items():
        cluster = read_cluster(CLUSTERS / file)
        draws = [simulate_all(cluster, seed) for seed in range(options.seeds)]
        print(f"\n{trace}, the first draw\n{as_table(draws[0])}\n")
        rows = []
        for same in zip(*(claims(trace, outcomes) for outcomes in draws), strict=True):
            simulated = [claim.simulated for claim in same]
            middle = same[0]._replace(simulated=median(simulated))
            paper = f"{middle.low:g} to {middle.high:g}" if middle.low < middle.high else f"{middle.low:g}"
            draws_of = f"{min(simulated):.2f} to {max(simulated):.2f}"
            rows.append([middle.what, paper, f"{middle.simulated:.3f}", draws_of, f"{middle.deviation:+.0%}"])
            unit = "×" if "idle" not in middle.what else ""
            what = f"{trace}: {middle.what}; the paper: {paper}"
            findings.append(Finding(what, middle.simulated, unit, interval=spread(simulated)))
        print(table([trace, "paper", "median", "draws", "off by"], rows))
    if options.figure is not None:
        workers_over_time(draws[0]).figure.savefig(options.figure)  # of the last trace, DAPO's
    write_result(
        options.output, "workers", "SpecActor's cluster, simulated",
        f"Both traces as `examples/clusters` describes them: median and range of {options.seeds} draws. Nothing was "
        "timed, the clock is simulated. The assumptions were searched on the first draw.",
        machine, None, findings, {"seeds": options.seeds},
    )  # fmt: skip


if __name__ == "__main__":
    main()
