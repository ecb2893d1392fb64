"""``spec-trl predict``: step times and speedups from a profile (ER Eq. 1 and 3), or where a step's time goes."""

import argparse
import itertools
import json

from ..scheduling.breakdown import Hardware, Shape, component_seconds, idealized_draft_ratio
from ..scheduling.profile import Profile
from .options import block_efficiency_of, table


def run(arguments: argparse.Namespace) -> None:
    if arguments.breakdown is not None:
        print(_breakdown(arguments))
        return
    if arguments.profile is None:
        raise ValueError("PROFILE is missing; name one that `spec-trl calibrate` wrote, or give --breakdown.")
    if arguments.block_efficiency is None and arguments.acceptance is None:
        raise ValueError("a speedup depends on acceptance; give --block-efficiency or --acceptance.")
    taus = {gamma: block_efficiency_of(arguments)(gamma) for gamma in arguments.draft_length}
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
    """Which of `batches` and `lengths` lie outside of the profile's sweep, as text."""
    if not profile.samples:
        return ""
    parts = []
    for name, wanted, measured in (
        ("B", batches, [sample.batch for sample in profile.samples]),
        ("S", lengths, [sample.length for sample in profile.samples]),
    ):
        low, high = min(measured), max(measured)
        if beyond := [value for value in wanted if not low <= value <= high]:
            parts.append(f"{name} = {', '.join(map(str, beyond))} (swept: {low:g} to {high:g})")
    return "; ".join(parts)


def _breakdown(arguments: argparse.Namespace) -> str:
    """Shares of a decoding step's parts for each (B, S)."""
    if arguments.profile is not None:
        raise ValueError(f"--breakdown needs no profile; leave out {arguments.profile}.")
    if arguments.flops is None or arguments.bandwidth is None:
        raise ValueError("--breakdown needs the device's peaks; give --flops and --bandwidth.")
    try:
        content = json.loads(arguments.breakdown.read_text())
    except ValueError as error:
        raise ValueError(f"{arguments.breakdown} is not JSON ({error}); give a model's config.json.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{arguments.breakdown} holds no JSON object; give a model's config.json.")
    shape, hardware = Shape.from_config(content), Hardware(arguments.flops, arguments.bandwidth)
    header = ["B", "S", *_PARTS.values(), "T_p ms", "W4 T_q/T_p", "W8 T_q/T_p"]
    rows = []
    for batch, length in itertools.product(arguments.batch, arguments.length):
        seconds = component_seconds(shape, hardware, batch, length)
        total = sum(seconds.values())
        shares = [f"{seconds[part] / total:.1%}" for part in _PARTS]
        ratios = [f"{idealized_draft_ratio(shape, bits, batch, length):.3f}" for bits in (4, 8)]
        rows.append([str(batch), str(length), *shares, f"{1e3 * total:.3f}", *ratios])
    return table(header, rows)


_PARTS = {"ffn": "FFN", "qkvo": "QKVO", "attention": "attention", "lm_head": "LM head", "nonlinear": "nonlinear"}
