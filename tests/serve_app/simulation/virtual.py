"""A profile with round numbers, and a device whose time passes only while something waits for it."""

from typing import Any

from serve_app.simulation.device import Device
from serve_app.simulation.profiles import Profile

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


class VirtualTime:
    """A clock that `sleep` moves.

    Attributes:
        now: Seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the time."""
        self.now += seconds

    def device(self, profile: Profile) -> Device:
        """Return a device on this clock."""
        return Device(profile, self.clock, self.sleep)
