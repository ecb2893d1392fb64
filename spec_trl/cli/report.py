"""Runs `spec-trl report`: draws a training run as PNG files and one HTML page, and prints a summary."""

import argparse
import base64
import html
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ..json_files import write_atomically
from ..papers import Calibration, load
from ..trainers.run_log import Run, read_run
from ..trainers.run_verdict import verdict_of
from . import figures
from .plotting import Drawing


@dataclass(frozen=True)
class Section:
    """One part of the report. `name`: of its PNG and its anchor; `missing`: the reason without a drawing, if a user
    can change that. A section without drawing and reason is left out."""

    name: str
    title: str
    drawing: Drawing | None
    missing: str = ""

    @property
    def text(self) -> str:
        return self.missing if self.drawing is None else self.drawing.text


def run(arguments: argparse.Namespace) -> None:
    log = read_run(arguments.run)
    profile, missing = _profile_of(log, arguments.profile)
    output = arguments.output or log.path.parent / "report"
    every = _build(log, profile, arguments.margin, missing)
    sections = [section for section in every if section.text]
    pictures: dict[str, bytes] = {}
    for section in tqdm(sections, desc="drawing", unit="figure"):
        if section.drawing is not None:
            picture = io.BytesIO()
            section.drawing.figure.savefig(picture, format="png", dpi=110)
            pictures[section.name] = picture.getvalue()
            write_atomically(output / f"{section.name}.png", picture.getvalue())
    page = output / "report.html"
    write_atomically(page, _render(log, sections, pictures))
    header, rollouts, evaluation = log.header, len(log.of("train")), len(log.of("eval"))
    print(
        f"{header.model}, {header.dtype}, {header.hardware}, assistant_strategy={header.strategy!r}: "
        f"{rollouts} training rollouts, {evaluation} of evaluation, {len(log.steps)} steps"
    )
    print("\n".join(f"{section.title}: {section.text}" for section in sections))
    if left_out := [section.title for section in every if not section.text]:
        print(f"nothing to show for: {', '.join(left_out)}")
    print(f"written: {page} and {len(pictures)} PNG files next to it")


def _build(log: Run, profile: Calibration, margin: float, missing: str) -> list[Section]:
    """All sections of the report; `missing` says why there is no `profile`."""
    train = log.of("train")
    boundary, whose = None, ""
    if profile is not None:
        figure = load("papers.efficient_rollout.commands.boundary")
        points, idle = figure.points_of_run(train, profile.roofline)
        taus = figure.block_efficiency_of_run(train)
        if not points or not taus:  # the run never speculated: the calibration shows why
            points, whose = figure.points_of_sweep(profile.samples, float), " by the calibration's times at τ = γ"
            taus = {gamma: float(gamma) for gamma in sorted({point.draft_length for point in points})}
        boundary = figure.toggle_boundary(profile.roofline, points, taus, margin, profile.draft_max_rows, idle)
        missing = "no speculative rounds were measured often enough, and the profile holds no times."
    by_first, by_tau = (figures.entropy_against(train, of) for of in ("first_token_acceptance", "block_efficiency"))
    return [
        Section("verdict", "Verdict", figures.verdict_of_run(log), str(verdict_of(log)[0])),
        Section("step_time", "Step time", figures.step_times(log.steps)),
        Section("reward", "Reward", figures.reward(log.steps)),
        Section("rollout_time", "Rollout time", figures.rollout_phases(train)),
        Section("completion", "Completion curve", figures.completion_curves(train)),
        Section("ranks", "Ranks", figures.rank_seconds(train)),
        Section("plan", "Plan over rounds", figures.plans_over_rounds(train)),
        Section("timeline", "Who drafted for whom", figures.timeline_of_run(train)),
        Section("draft_length", "Draft length and τ", figures.draft_length_schedule(train)),
        Section("entropy_acceptance", "Entropy and first-token acceptance", by_first),
        Section("entropy_efficiency", "Entropy and block efficiency", by_tau),
        Section("depth", "Block efficiency by output depth", figures.depth_efficiency(train)),
        Section("speedup", "Predicted and measured speedup", figures.speedups(train)),
        Section("toggle_boundary", f"Toggle boundary{whose}", boundary, missing),
    ]


def _render(log: Run, sections: Sequence[Section], pictures: dict[str, bytes]) -> str:
    """The page: one HTML file, pictures inside, nothing from the network."""
    escape, header = html.escape, log.header
    title = f"Rollouts of {escape(header.model)}"
    facts = [
        ("model", header.model), ("dtype", header.dtype), ("hardware", header.hardware),
        ("assistant_strategy", header.strategy), ("profile", header.profile or "none"),
        ("started", ", resumed ".join(each.started for each in log.headers)),
        *((name, str(value)) for name, value in sorted(header.settings.items()) if name != "assistant_strategy"),
    ]  # fmt: skip
    contents = " · ".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections)
    parts = [_HEAD.format(title=title), f"<h1>{title}</h1>", f"<p>{contents}</p>"]
    for section in sections:
        parts += [f'<h2 id="{section.name}">{escape(section.title)}</h2>', f"<p>{escape(section.text)}</p>"]
        if section.name in pictures:
            data = base64.b64encode(pictures[section.name]).decode()
            parts.append(f'<img alt="{escape(section.title)}" src="data:image/png;base64,{data}">')
        if section.drawing is not None and section.drawing.table:
            parts.append(_table(section.drawing.table))
    parts += ["<h2>Settings</h2>", _table([("setting", "value"), *facts]), "</body>", "</html>", ""]
    return "\n".join(parts)


def _profile_of(log: Run, named: Path | None) -> tuple[Calibration, str]:
    """Returns the profile to draw with, or the reason why there is none. A profile that the user names must be
    readable; that of the run may be missing."""
    if named is not None:
        return load("papers.efficient_rollout.profile").Profile.load(named), ""
    if log.header.profile is None:
        return None, ""
    path = Path(log.header.profile)
    if not path.exists():  # the folder was moved, or the run was started elsewhere
        path = log.path.parent / path.name
    if not path.exists():
        return None, f"the run's profile {log.header.profile} is gone; name one with --profile."
    try:
        return load("papers.efficient_rollout.profile").Profile.load(path), ""
    except ValueError as error:
        warnings.warn(f"the run's own profile cannot be read: {error}", stacklevel=2)
        return None, "the run's profile cannot be read; name one with --profile."


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["<table>"]
    for tag, row in zip(["th", *["td"] * (len(rows) - 1)], rows, strict=True):
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "\n".join([*lines, "</table>"])


_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }}
img {{ max-width: 100%; }}
table {{ border-collapse: collapse; margin: 1em 0; }}
th, td {{ border: 1px solid #ccc; padding: 0.2em 0.7em; text-align: left; }}
th {{ background: #eee; }}
h2 {{ margin-top: 2em; }}
</style>
</head>
<body>"""
