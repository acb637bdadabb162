"""A profile with round numbers, and a device whose time passes only while something waits for it."""

from typing import Any

from serve_app.simulation.device import Device
from serve_app.simulation.profiles import Profile
from tests.fakes.clock import Clock

NUMBERS: dict[str, Any] = {
    "name": "round",
    "base_ms": 10.0,
    "per_prefill_token_ms": 0.5,
    "per_sequence_ms": 2.0,
    "per_kv_token_ms": 0.25,
    "load_s": 7.0,
    "sleep_s": 3.0,
    "wake_s": 4.0,
    "kv_tokens": 1024,
    "max_model_len": 512,
}


def profile(**fields: Any) -> Profile:
    """Return the profile with other values for some fields."""
    return Profile.model_validate(NUMBERS | fields)


def device_of(profile: Profile, time: Clock) -> Device:
    """Return a device on a clock."""
    return Device(profile, time, time.sleep)
