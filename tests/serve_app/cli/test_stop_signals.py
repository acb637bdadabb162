"""Signals that ask a service to stop."""

import os
import signal
from collections.abc import Iterator

import pytest

from serve_app.cli.stop_signals import StopSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restores the handlers of this process."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def signals() -> StopSignals:
    signals = StopSignals()
    signals.catch()
    return signals


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_without_a_signal_the_wait_times_out(signals: StopSignals) -> None:
    assert signals.wait(0.0) is False
    assert not signals.asked


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_this_wait_and_all_later_ones(signals: StopSignals, number: signal.Signals) -> None:
    send(number)
    assert signals.wait(60.0)
    assert signals.wait(60.0)
    assert not signals.at_once


@pytest.mark.parametrize("first", NUMBERS)
def test_an_interrupt_after_another_signal_is_impatient(signals: StopSignals, first: signal.Signals) -> None:
    send(first)
    send(signal.SIGINT)
    assert signals.at_once


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_may_come_several_times(signals: StopSignals, number: signal.Signals) -> None:
    send(number)
    send(number)
    assert signals.asked
    assert not signals.at_once


def test_a_service_under_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = StopSignals()
    signals.catch()
    send(signal.SIGHUP)
    assert not signals.asked
