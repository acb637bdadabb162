"""The count of faults: errors that are logged with their stack."""

import logging
from collections.abc import Iterator

import pytest

from serve_app.api.errors import EngineLostError, RequestError
from serve_app.telemetry.catalogue import FAULTS
from serve_app.telemetry.faults import FaultCount
from serve_app.telemetry.meters import Meters
from tests.serve_app.telemetry.instruments import Instruments

LOG = logging.getLogger("tests.faults")


@pytest.fixture
def faults() -> Iterator[FaultCount]:
    faults = FaultCount("tests.faults")
    yield faults
    faults.stop()


def log(error: Exception, level: int = logging.ERROR) -> None:
    try:
        raise error
    except Exception:
        LOG.log(level, "it failed", exc_info=True)


def test_an_error_with_a_stack_is_a_fault_and_nothing_else(faults: FaultCount) -> None:
    log(KeyError("a"))
    log(ValueError("b"))
    assert faults.total == 2
    # A warning with a stack, an error in one line, a refusal and a lost engine are no faults.
    log(OSError("away"), logging.WARNING)
    LOG.error("full")
    log(RequestError(429, "rate_limit_error", "full"))
    log(EngineLostError())
    assert faults.total == 2


def test_the_metric_follows_the_count_until_it_is_stopped(faults: FaultCount) -> None:
    instruments = Instruments()
    meters = Meters([FAULTS], instruments.make)
    faults.report(meters)
    assert instruments.series(FAULTS) == set()
    for _ in range(2):
        log(KeyError("a"))
        faults.report(meters)
        faults.report(meters)
    assert instruments.total(FAULTS) == 2
    faults.stop()
    log(KeyError("a"))
    assert faults.total == 2
