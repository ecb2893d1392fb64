"""Runs `spec-trl predict`: prints step times and speedups from a profile (ER Eq. 1 and 3)."""

import argparse
import itertools

from ....cli.arguments import table
from ..profile import Profile
from .arguments import block_efficiency_of


def run(arguments: argparse.Namespace) -> None:
    if arguments.block_efficiency is None and arguments.acceptance is None:
        raise ValueError("a speedup depends on acceptance; give --block-efficiency or --acceptance.")
    taus = {gamma: block_efficiency_of(arguments, gamma) for gamma in arguments.draft_length}
    profile = Profile.load(arguments.profile)
    roofline, limit = profile.roofline, profile.draft_max_rows
    rows = []
    for batch, length, gamma in itertools.product(arguments.batch, arguments.length, arguments.draft_length):
        target = roofline.target_seconds(batch, length)
        draft = roofline.draft_seconds(batch, length)
        verify = roofline.verify_seconds(batch, length, gamma)
        speedup = roofline.speedup(batch, length, taus[gamma], gamma)
        if limit is not None and batch > limit:
            decision = f"autoregressive: the drafter serves {limit} rows"
        else:
            decision = "speculate" if speedup >= 1 + arguments.margin else "autoregressive"
        times = [f"{1e3 * seconds:.3f}" for seconds in (target, draft, verify)]
        rows.append([str(batch), str(length), str(gamma), f"{taus[gamma]:.2f}", *times, f"{speedup:.3f}", decision])
    print(f"{profile.key.hardware}; {profile.key.shape}; {profile.key.dtype}; drafter {profile.key.quantization}")
    print(table(["B", "S", "γ", "τ", "T_p ms", "T_q ms", "T_V ms", "speedup", "decision"], rows))
    if outside := _outside(profile, arguments.batch, arguments.length):
        print(f"beyond what was measured, so extrapolated: {outside}")


def _outside(profile: Profile, batches: list[int], lengths: list[int]) -> str:
    if not profile.samples:
        return ""
    parts = []
    for name, wanted, field in (("B", batches, "batch"), ("S", lengths, "length")):
        swept = [vars(sample)[field] for sample in profile.samples]
        if beyond := [value for value in wanted if not min(swept) <= value <= max(swept)]:
            parts.append(f"{name} = {', '.join(map(str, beyond))} (swept: {min(swept):g} to {max(swept):g})")
    return "; ".join(parts)
