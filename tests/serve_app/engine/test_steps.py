"""The learned times of steps."""

import random

import pytest

from serve_app.engine.steps import StepTimes
from serve_app.simulation.profiles import StepLine, Work

L4 = StepLine(0.051, 0.00025, 0.00001, 0.00000019)


def works(seed: int, number: int) -> list[Work]:
    draw = random.Random(seed)
    return [
        Work(
            draw.choice([0, 0, draw.randrange(2048)]),
            count := draw.randrange(1, 256),
            count * draw.randrange(900),
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("line", [L4, StepLine(0.006, 0.000024, 0.0000098, 0.000000033)], ids=["l4", "h100"])
def test_the_line_is_learned_from_steps(line: StepLine) -> None:
    times = StepTimes()
    for work in works(1, 200):
        times.learn(work, line.seconds(work))
    for work in works(2, 50):
        assert times.predict(work) == pytest.approx(line.seconds(work), rel=0.02)
    assert times.per_prompt_token == pytest.approx(line.prompt_token, rel=0.02)


def test_noise_and_pauses_of_the_process_hardly_move_it() -> None:
    draw, times = random.Random(3), StepTimes()
    for number, work in enumerate(works(4, 600)):
        pause = 1.0 if number % 50 == 49 else 0.0
        times.learn(work, L4.seconds(work) * draw.uniform(0.95, 1.05) + pause)
    errors = [abs(times.predict(work) / L4.seconds(work) - 1) for work in works(5, 100)]
    assert sum(errors) / len(errors) < 0.05
    # The noise is 2.5% on average, and each 50th step is another one.
    assert times.error == pytest.approx(0.04, abs=0.02)


def test_a_device_that_becomes_slower_is_learned_again() -> None:
    times = StepTimes()
    for work in works(6, 500):
        times.learn(work, L4.seconds(work))
    for work in works(7, 1500):
        times.learn(work, 2 * L4.seconds(work))
    for work in works(8, 20):
        assert times.predict(work) == pytest.approx(2 * L4.seconds(work), rel=0.1)


def test_no_time_is_negative_where_the_steps_are_all_alike() -> None:
    draw, times = random.Random(9), StepTimes()
    for _ in range(300):
        times.learn(Work(0, 100, 30_000), 0.06 * draw.uniform(0.9, 1.1))
    assert min(times.line) >= 0
    assert times.predict(Work(0, 100, 30_000)) == pytest.approx(0.06, rel=0.05)


def test_what_fits_into_a_step_is_what_is_predicted_for_it() -> None:
    times = StepTimes()
    for work in works(10, 200):
        times.learn(work, L4.seconds(work))
    beside = Work(0, 50, 10_000)
    tokens = times.prompt_tokens(0.2, beside)
    assert times.predict(beside._replace(prompt_tokens=tokens)) == pytest.approx(0.2, abs=0.0005)
    assert times.prompt_tokens(0.01, beside) < 0


def test_nothing_is_known_before_enough_steps_were_seen() -> None:
    times = StepTimes()
    for number in range(16):
        assert times.known == (number >= 16)
        times.learn(Work(0, 1, 10), 0.05)
    assert times.known
    times.learn(Work(0, 1, 10), 0.0)
