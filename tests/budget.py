"""The CPU time that a test of the short run may use: `slow.txt` names the tests that may use more."""

import functools
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

NOISE = 3.0
"""The count of CPU time on a busy machine, in relation to a quiet one, at most: beyond it a test fails."""

LIMIT_S = 3.0
"""Seconds of CPU of a test with its own fixtures, on a machine that counts `COUNT_S`."""

COUNT_S = 0.07
"""Seconds of CPU of `count` on the machine for which `LIMIT_S` is meant."""

SLOW = Path(__file__).with_name("slow.txt")
"""The tests that may use more, a line each: its id without parameters, and the reason."""

USED = "cpu_s"
"""The name of a test's CPU time among the properties of its report."""


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def count() -> float:
    """Return the CPU seconds of a fixed piece of work: they tell how fast this machine is now."""
    began = time.thread_time()
    sum(number * number for number in range(1_000_000))
    return time.thread_time() - began


@functools.cache
def slow() -> dict[str, str]:
    """Return the tests of `slow.txt` with their reasons."""
    lines = [line for line in SLOW.read_text().splitlines() if line and not line.startswith("#")]
    return {name: reason for name, _, reason in (line.partition(" ") for line in lines)}


class Budget:
    """Fails a test that uses more CPU than it may.

    Fixtures of a module or of the session count for no test: any test may be the first that uses them.
    Tests of a running service are exempt: its processes do their work.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._shared = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        """Begin to count."""
        self._shared, self._began = 0.0, cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Leave the set-up of a shared fixture out."""
        shared, began = self._shared, cpu_s()
        result = yield
        if fixturedef.scope != "function":
            self._shared = shared + cpu_s() - began
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Compare the time with the limit."""
        result = yield
        used = cpu_s() - self._began - self._shared
        item.user_properties.append((USED, round(used, 2)))
        name = item.nodeid.partition("[")[0]
        exempt = name in slow() or item.get_closest_marker("long") or "/e2e/" in item.nodeid
        if used > LIMIT_S and not exempt:
            limit_s = LIMIT_S * max(1.0, sum(count() for _ in range(3)) / 3 / COUNT_S)
            assert used <= NOISE * limit_s, (
                f"{used:.1f} s of CPU; a test of the short run has {limit_s:.1f} s. Make it faster, mark it "
                f"`long`, or name it in {SLOW.name} with the reason."
            )
        return result
