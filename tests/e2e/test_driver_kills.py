"""The driver, an Engine and the whole service, ended with SIGKILL at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from serve_app.api.protocol import JSON
from serve_app.demo.questions import all_questions, to_jsonl
from tests import progress
from tests.e2e.service import Service
from tests.e2e.services import Restartable
from tests.progress import wait_until

ENGINE = "ServeReplica:llm:Engine:demo"


def questions(path: Path, count: int) -> Path:
    path.write_text(to_jsonl(random.Random(0).sample(all_questions(), count)))
    return path


def start(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "serve_app.cli", "batch", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(driver: "subprocess.Popen[str]") -> str:
    """Wait for a driver that succeeds, and return its messages."""
    _, said = progress.finish(driver)
    assert driver.returncode == 0, said
    return said


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def reached(driver: "subprocess.Popen[str]", out: Path, count: int) -> bool:
    """Return whether so many rows are written by a driver that runs."""
    assert driver.poll() is None, driver.communicate()[1]
    return lines(out) >= count


def rows(path: Path) -> list[JSON]:
    """Return the rows without their attempts: a kill costs some."""
    found: list[JSON] = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "attempts"} for row in found]


def run_through(
    url: str, folder: Path, count: int, victims: Sequence[str], kill: Callable[[str], None]
) -> None:
    """Run a dataset once undisturbed and once with kills; check that both outputs are the same.

    Args:
        url: The service.
        folder: For the files.
        count: Rows of the dataset.
        victims: What is killed, one after the other: "driver", or anything that `kill` takes.
        kill: Kills a part of the service.
    """
    source = questions(folder / "in.jsonl", count)
    quiet, out = folder / "quiet.jsonl", folder / "out.jsonl"
    finish(start(source, quiet, "--url", url))

    dice = random.Random(0)
    arguments = (source, out, "--url", url, "--max-concurrency", 40)
    driver = start(*arguments)
    for number, victim in enumerate(victims):
        moment = int(count * (number + dice.random()) / (len(victims) + 1))
        wait_until(partial(reached, driver, out, moment), every_s=0.002)
        done = lines(out)
        print(f"kill {number + 1}: the {victim} after {done} rows", flush=True)
        if victim == "driver":
            driver.kill()
            progress.finish(driver)
            assert lines(out) >= done
            driver = start(*arguments)
        else:
            kill(victim)
    finish(driver)

    assert rows(out) == rows(quiet)
    assert [row["row"] for row in rows(out)] == list(range(count))
    answers = {question.prompt: question.answer for question in all_questions()}
    asked = [json.loads(line) for line in source.read_text().splitlines()]
    right = sum(row["result"] == answers[one["prompt"]] for row, one in zip(rows(out), asked, strict=True))
    assert right >= 0.99 * count


@pytest.mark.long
def test_the_output_is_that_of_an_undisturbed_run(pair: Service, tmp_path: Path) -> None:
    one, other = pair.pids(ENGINE)

    def kill(victim: str) -> None:
        os.kill(one, signal.SIGKILL)

    run_through(pair.url, tmp_path, 1000, ["driver", "engine"], kill)
    assert one not in pair.pids(ENGINE)
    assert other in pair.pids(ENGINE)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_output_is_the_same_after_nine_kills(restartable: Restartable, tmp_path: Path) -> None:
    def kill(victim: str) -> None:
        if victim == "service":
            restartable.kill_all()
        else:
            restartable.kill(ENGINE)

    victims = ["driver", "engine", "service"] * 3
    random.Random(1).shuffle(victims)
    run_through(restartable.url, tmp_path, 2500, victims, kill)
