"""The timeline of a simulated device, on a clock of the test."""

import pytest

from serve_app.simulation.device import Device
from serve_app.simulation.profiles import Work
from tests.fakes.clock import Clock
from tests.serve_app.simulation.virtual import device_of, profile


@pytest.fixture
def time() -> Clock:
    return Clock()


@pytest.fixture
def device(time: Clock) -> Device:
    return device_of(profile(), time)


@pytest.mark.parametrize(
    ("work", "milliseconds"),
    [
        (Work(0, 0, 0), 10.0),
        (Work(100, 0, 0), 60.0),
        (Work(0, 4, 0), 18.0),
        (Work(0, 0, 40), 20.0),
        (Work(100, 4, 40), 78.0),
    ],
)
def test_a_step_takes_its_base_and_its_work(work: Work, milliseconds: float) -> None:
    assert profile().step.seconds(work) == pytest.approx(milliseconds / 1000)


def test_steps_run_one_after_the_other(device: Device, time: Clock) -> None:
    ends = [device.submit(Work(0, 0, 0)) for _ in range(3)]
    assert ends == pytest.approx([0.01, 0.02, 0.03])
    assert time.now == 0.0


def test_an_idle_device_starts_a_step_at_once(device: Device, time: Clock) -> None:
    device.submit(Work(0, 0, 0))
    time.now = 5.0
    assert device.submit(Work(0, 0, 0)) == pytest.approx(5.01)


def test_waiting_ends_with_the_step_and_not_later(device: Device, time: Clock) -> None:
    first, second = device.submit(Work(0, 0, 0)), device.submit(Work(0, 0, 0))
    time.now = 0.015
    device.wait(first)
    assert time.now == 0.015
    device.wait(second)
    assert time.now == pytest.approx(0.02)


def test_weights_take_their_time(device: Device, time: Clock) -> None:
    device.load()
    assert time.now == 7.0
    device.fall_asleep()
    assert time.now == 10.0
    device.wake_up()
    assert time.now == 14.0


def test_the_first_sleep_takes_longer() -> None:
    time = Clock()
    device = device_of(profile(pin_s=20.0), time)
    device.fall_asleep()
    assert time.now == 23.0
    device.wake_up()
    device.fall_asleep()
    assert time.now == 30.0
