"""Reads the JSON files that the EfficientRollout authors published beside their sweeps."""

from datetime import date
from typing import Any

from ..scheduling.profile import Profile, ProfileKey
from ..scheduling.roofline import Coefficients, ModelConstants, Roofline


MICROSECOND = 1e-6  # their c_T, c_D, c_V are in µs per row


def is_published(content: dict[str, Any]) -> bool:
    """Whether a JSON object is one of theirs: a fit, or a model's constants."""
    return "calibration" in content or "W_t" in content


def read_published(content: dict[str, Any], place: str) -> tuple[ModelConstants, Profile | None, float | None]:
    """A published fit (`published_fit_*.json`) or the constants of a model (`model_constants_*.json`).

    Args:
        content: the JSON object.
        place: the file's name, for errors.

    Returns:
        The constants, the fit as a profile without samples, and the peak bandwidth in B/s; the last two are None for
        constants.

    Raises:
        ValueError: a field is missing or no number; names the file and the field.
    """
    fit = content.get("calibration")
    shape = content if fit is None else _entry(content, "model", dict, place)
    constants = ModelConstants(
        name=_entry(shape, "model" if fit is None else "name", str, place),
        weight_bytes=_real(shape, "W_t", place),
        draft_weight_bytes=_real(shape, "W_d", place),
        dense_flops=_real(shape, "C_dense", place),
        attention_flops=_real(shape, "C_attn", place),
        kv_bytes=_real(shape, "kappa_theoretical", place),
    )
    if fit is None:
        return constants, None, None
    hardware = _entry(content, "hardware", dict, place)
    coefficients = Coefficients(
        F_eff=_real(fit, "F_eff", place),
        BW_eff=_real(hardware, "BW_eff", place),
        rho_kappa=_real(fit, "kappa_eff", place) / constants.kv_bytes,
        eta_D=_real(fit, "eta_d", place),
        c_T=_real(fit, "c_T", place) * MICROSECOND,
        c_D=_real(fit, "c_D", place) * MICROSECOND,
        c_V=_real(fit, "c_V", place) * MICROSECOND,
    )
    # What their files do not say is in the paper: two-byte weights (App. E.3), W4A16 Marlin kernels (App. C.2).
    key = ProfileKey(_entry(hardware, "gpu", str, place), constants.name, "16 bit", "w4", "marlin")
    roofline = Roofline(constants, coefficients)
    profile = Profile(key, roofline, None, {}, date.today().isoformat())
    return constants, profile, _real(hardware, "BW_peak", place)


def _real(content: dict[str, Any], name: str, place: str) -> float:
    return float(_entry(content, name, (int, float), place))


def _entry(content: dict[str, Any], name: str, kind: Any, place: str) -> Any:
    if name not in content:
        raise ValueError(f"{place} lacks {name!r}; restore the published file.")
    if not isinstance(content[name], kind) or isinstance(content[name], bool):
        raise ValueError(f"{place} has {name}={content[name]!r:.60}, which is of the wrong type; restore the file.")
    return content[name]
