"""``spec-trl simulate`` on a small cluster, and the two that ship."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from benchmarks.paper.specactor import (
    BASELINES,
    CLUSTERS,
    SPECACTOR,
    TRACES,
    Claim,
    claims,
    paper_methods,
    simulate_all,
)
from spec_trl.cli.main import main
from spec_trl.papers.specactor.commands.simulate import methods_for, read_cluster
from spec_trl.papers.specactor.simulator import simulate
from tests.papers.specactor.test_simulator import CLUSTER


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, figure = tmp_path / "cluster.yaml", tmp_path / "workers.png"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(CLUSTER)))))
    assert read_cluster(file) == CLUSTER
    assert main(["simulate", str(file), "-o", str(figure)]) == 0
    head, columns, *rows, said = capsys.readouterr().out.strip().splitlines()
    assert head == "small: 64 requests on 16 GPUs, 2 per worker"
    assert columns.split()[0] == "method" and len(rows) == 11
    plain, pool = rows[0].split(), rows[-1].split()
    assert plain[0] == "plain" and plain[-3:-1] == ["1.00", "1.00"] and float(pool[-3]) > 1
    assert said.startswith(f"{figure}: the last request ends after: plain ") and figure.stat().st_size > 0


@pytest.mark.parametrize("written", ["2e1", "+2E+1", "200e-1", "20.", ".2e2", "20"])
def test_numbers_may_have_an_exponent(written: str, tmp_path: Path) -> None:
    """PyYAML by itself reads 2e1 as text."""
    file = tmp_path / "cluster.yaml"
    text = yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(CLUSTER))))
    file.write_text(text.replace("learn_seconds: 20.0", f"learn_seconds: {written}"))
    assert f": {written}\n" in file.read_text() and read_cluster(file) == CLUSTER


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: " + "[" * 3000, "more than 20 levels of nesting"),
        ("a: &a [1, 1]\nb: *a\n", r"an alias \(\*name\)"),
        ("&a [*a]", r"an alias \(\*name\)"),
        ("#" * 1_000_001, "has 1,000,001 bytes"),
    ],
    ids=["nested", "alias", "endless", "large"],
)
def test_files_that_would_take_all_memory_or_time(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"cluster.yaml .*{message}"):
        read_cluster(file)


@pytest.mark.parametrize("changes", [{"requests": 1}, {"gpus": 2}, {"gpus": 3}, {"gpus": 1, "worker_gpus": 1}])
def test_small_clusters(changes: dict[str, int]) -> None:
    cluster = dataclasses.replace(CLUSTER, **changes)
    methods = methods_for(cluster)
    assert all(simulate(cluster, method).rollout_seconds > 0 for method in methods)
    assert any(method.execution == "decoupled" for method in methods) == (cluster.gpus > cluster.worker_gpus)


def test_the_papers_clusters_are_as_it_says() -> None:
    clusters = [read_cluster(CLUSTERS / file) for file in TRACES.values()]
    for cluster, name, requests in zip(clusters, TRACES, (8192, 16384), strict=True):
        assert (cluster.name, cluster.requests, cluster.gpus, cluster.worker_gpus) == (name, requests, 256, 4)
        assert cluster.lengths.maximum == 20_000 and cluster.target.seconds(1, 500)(1) < 0.013
        assert [drafter.name for drafter in cluster.drafters] == ["Qwen2.5-0.5B", "Qwen2.5-1.5B", "n-gram"]
        names = [*paper_methods(cluster)]
        assert names[:5] == BASELINES and SPECACTOR in names and len(names) == 10
    one, other = (dataclasses.replace(cluster, name="", requests=1) for cluster in clusters)
    assert one == other  # no assumption is made for one trace


def test_claims_of_the_paper() -> None:
    assert Claim("", 2.0, 2.4, 2.2).deviation == 0
    assert Claim("", 2.0, 2.4, 1.0).deviation == -0.5 and Claim("", 1.0, 2.0, 3.0).deviation == 0.5
    drafters = read_cluster(CLUSTERS / TRACES["DAPO-32B-20K"]).drafters
    outcomes = simulate_all(dataclasses.replace(CLUSTER, drafters=drafters), 0)
    found = {claim.what: claim.simulated for claim in claims("DAPO", outcomes)}
    ratio = outcomes["veRL"].rollout_seconds / outcomes[SPECACTOR].rollout_seconds
    assert found["rollout, SpecActor over veRL"] == ratio
    assert found["idle share of veRL's workers"] == outcomes["veRL"].idle_share
    assert len(claims("GRPO", outcomes)) == len(found) - 5
