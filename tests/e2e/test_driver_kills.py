"""The driver, an Engine and the whole service, ended with SIGKILL at any moment.

SATURATE_KILLS=20 SATURATE_KILL_ROWS=5000 makes it the long form; with three kills or more one is the service.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.demo.questions import all_questions, to_jsonl
from tests.e2e.service import ROOT, Service

KILLS = int(os.environ.get("SATURATE_KILLS", "2"))
ROWS = int(os.environ.get("SATURATE_KILL_ROWS", "1000"))
SEED = int(os.environ.get("SATURATE_KILL_SEED", "0"))
LIMIT_S = 180
ENGINE = "ServeReplica:llm:Engine:demo"

JSON = dict[str, Any]


class Restartable:
    """A service that can be killed and started again in its place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.service = Service(self._config(), folder)
        self.url = self.service.url

    def kill_all(self) -> None:
        """End every process of it at once, and start it anew on the same port."""
        while self.service.kill():
            pass
        self.service.process.wait(timeout=30)
        self.service = Service(self._config(), self._folder, int(self.url.rpartition(":")[2]))

    @staticmethod
    def _config() -> JSON:
        config: JSON = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
        return config


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    live = Restartable(tmp_path_factory.mktemp("restartable"))
    yield live
    live.service.stop()


def questions(path: Path, count: int) -> Path:
    path.write_text(to_jsonl(random.Random(0).sample(all_questions(), count)))
    return path


def start(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "serve_app.driver", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(driver: "subprocess.Popen[str]") -> str:
    """Wait for a driver that succeeds, and return what it said."""
    _, said = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, said
    return said


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def rows(path: Path) -> list[JSON]:
    """Return the rows, without how often each was sent: a kill costs attempts."""
    found: list[JSON] = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "attempts"} for row in found]


@pytest.mark.timeout(LIMIT_S * max(KILLS, 3))
def test_whatever_is_killed_the_output_is_that_of_an_undisturbed_run(
    live: Restartable, tmp_path: Path
) -> None:
    source = questions(tmp_path / "in.jsonl", ROWS)
    quiet, out = tmp_path / "quiet.jsonl", tmp_path / "out.jsonl"
    finish(start(source, quiet, "--url", live.url))

    dice = random.Random(SEED)
    victims = [["driver", "engine", "service"][number % 3] for number in range(KILLS)]
    dice.shuffle(victims)
    arguments = (source, out, "--url", live.url, "--chunk-size", 10, "--max-concurrency", 4)
    driver = start(*arguments)
    for number, victim in enumerate(victims):
        moment = int(ROWS * (number + dice.random()) / (KILLS + 1))
        deadline = time.monotonic() + LIMIT_S
        while (done := lines(out)) < moment:
            assert driver.poll() is None, driver.communicate()[1]
            assert time.monotonic() < deadline, f"{done} rows, waiting for {moment}"
            time.sleep(0.002)
        print(f"kill {number + 1}: the {victim} after {done} rows", flush=True)
        match victim:
            case "driver":
                driver.kill()
                driver.communicate(timeout=30)
                assert lines(out) >= done
                driver = start(*arguments)
            case "engine":
                # It may be on its way back from the last one.
                while not live.service.kill(ENGINE):
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            case _:
                live.kill_all()
    finish(driver)

    assert rows(out) == rows(quiet)
    assert [row["row"] for row in rows(out)] == list(range(ROWS))
    answers = {question.prompt: question.answer for question in all_questions()}
    asked = [json.loads(line) for line in source.read_text().splitlines()]
    right = sum(row["result"] == answers[one["prompt"]] for row, one in zip(rows(out), asked, strict=True))
    assert right >= 0.99 * ROWS
