"""The file of a measured profile, which `saturate plan` and `simulate` in a config read."""

from collections.abc import Mapping
from datetime import datetime

from serve_app.simulation.profiles import Profile
from serve_app.system.yaml_text import dump
from serve_app.tuning.observations import Fit, ObservationError
from serve_app.tuning.service import Facts

DIGITS = 4
"""Digits of a measured parameter that mean something."""


def profile_of(fit: Fit, facts: Facts, name: str, step_tokens: int) -> Profile:
    """Return the profile of a device.

    Args:
        fit: Its parameters.
        facts: What the service says about the model.
        name: The profile's name.
        step_tokens: `max_num_batched_tokens`, which the service doesn't tell.

    Raises:
        ObservationError: A step takes no time.
    """
    parameters: Mapping[str, float] = {key: _rounded(value) for key, value in fit.parameters.items()}
    if not parameters["base_ms"]:
        raise ObservationError("the fit has no base_ms: the times don't grow with the number of steps")
    return Profile(
        name=name[:64],
        **parameters,  # type: ignore[arg-type]
        # Not measured: planning doesn't need them.
        load_s=0.0,
        sleep_s=0.0,
        wake_s=0.0,
        kv_tokens=facts.kv_tokens,
        max_model_len=min(facts.max_model_len, facts.kv_tokens),
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=step_tokens,
    )


def file_of(profile: Profile, fit: Fit, source: str, at: datetime) -> str:
    """Return the text of a profile's file.

    Args:
        profile: The profile.
        fit: How well it describes the measurement.
        source: URL of the service.
        at: When it was measured.
    """
    fields = profile.model_dump(exclude={"device_gb", "awake_gb", "pin_s"})
    return (
        f"# Measured at {source}, {at:%Y-%m-%d %H:%M} UTC: R² {fit.r2:.4f}, largest error "
        f"{fit.largest_error:.1%}.\n"
        "# load_s, sleep_s, wake_s, async_scheduling aren't measured; max_num_batched_tokens is as given.\n"
        + dump(fields)
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
