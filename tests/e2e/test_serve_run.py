"""Plain `serve run`, without `saturate serve`: with the environment of this service, and without."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from serve_app.api.protocol import JSON
from serve_app.settings.environment import HOOK
from tests.e2e.service import MARK, give_ports
from tests.e2e.services import is_healthy, local, wait_until
from tests.ports import free_port
from tests.progress import ANSWER_S, STILL_S

pytestmark = pytest.mark.long

WARNING = "the environment of the replicas lacks RAY_SERVE_ENABLE_HA_PROXY"
BODY = {"prompts": ["What is 47+28?"], "task_id": "plain"}


class PlainRun:
    """`serve run` on a config.

    Attributes:
        url: Where it listens.
    """

    def __init__(self, config: JSON, own: dict[str, str], folder: Path) -> None:
        port = config["http_options"]["port"] = free_port()
        (app,) = config["applications"]
        app["args"]["batches"]["folder"] = str(folder / "batches")
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        self._mark = uuid.uuid4().hex
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(Path(sys.executable).with_name("serve")), "run", str(path)],
                cwd=folder,
                env=os.environ | own | {"RAY_USAGE_STATS_ENABLED": "0", MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition holds, as long as the process lives."""

        def holds() -> bool:
            assert self._process.poll() is None, self.log
            return true()

        wait_until(holds, tell=lambda: self.log, every_s=0.5)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def programs(self) -> str:
        """Return the command lines of its processes."""
        return "\n".join(" ".join(process.cmdline()) for process in self._processes())

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for process in self._processes():
            process.kill()

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark:
                    yield process
            except psutil.Error:
                continue


Start = Callable[[JSON, dict[str, str]], PlainRun]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[PlainRun] = []

    def begin(config: JSON, own: dict[str, str]) -> PlainRun:
        running.append(PlainRun(config, own, tmp_path))
        return running[-1]

    yield begin
    for one in running:
        one.stop()


def answer(run: PlainRun) -> Any:
    run.wait_until(lambda: is_healthy(run.url))
    return httpx.post(f"{run.url}/generate", json=BODY, timeout=ANSWER_S).raise_for_status().json()["results"]


def test_a_config_runs_as_with_saturate(start: Start) -> None:
    config, _, _ = local()
    run = start(config, {HOOK.name: HOOK.value, **give_ports(config)})
    assert answer(run) == ["75"]
    assert "haproxy" in run.programs()
    assert WARNING not in run.log


def test_without_the_environment_it_runs_with_a_warning_that_has_it(start: Start) -> None:
    config, _, _ = local()
    run = start(config, give_ports(config))
    assert answer(run) == ["75"]
    assert "haproxy" not in run.programs()
    run.wait_until(lambda: WARNING in run.log)
    assert f"{HOOK.name}={HOOK.value}" in run.log


def test_keys_without_the_environment_are_refused(start: Start, tmp_path: Path) -> None:
    config, app, _ = local()
    own = give_ports(config)
    keys = tmp_path / "keys.yaml"
    keys.write_text("[]")
    app["args"]["access"] = {"keys_file": str(keys)}
    run = start(config, own)
    run.wait_until(lambda: "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" in run.log)
    assert f"{HOOK.name}={HOOK.value}" in run.log
    assert not is_healthy(run.url)
