"""The end of a service: in order with SIGTERM, and without a process left after every kind of kill."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.service import ROOT, Service
from tests.e2e.waiting import running
from tests.progress import ANSWER_S, STILL_S, wait_until

GONE_S = 15.0
IDLE_S = 8.0


def test_sigterm_finishes_requests_in_flight_and_leaves_no_process(
    service: Service, http: httpx.Client
) -> None:
    before = service.processes()
    for name in ("raylet", "haproxy", "EngineCore", "ServeController"):
        assert any(name in line for line in before), f"{name} not among {before}"
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompts": ["once upon"] * 20, "max_tokens": 400, "ignore_eos": True, "model": "demo"}
        answers.append(httpx.post(f"{service.url}/generate", json=body, timeout=ANSWER_S))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: running(http) == 20, every_s=0.0)
    assert asking.is_alive()

    assert service.stop() == 0

    asking.join(STILL_S)
    assert [answer.status_code for answer in answers] == [200]
    assert service.processes() == []


def kill_child(service: Service) -> None:
    launcher, child = service.pids("serve_app.cli serve")
    assert launcher == service.process.pid
    os.kill(child, signal.SIGKILL)


def interrupt_twice(service: Service) -> None:
    service.process.send_signal(signal.SIGINT)
    wait_until(lambda: "Stopping" in service.output, news=service.news(), every_s=0.01)
    service.process.send_signal(signal.SIGINT)


KILLS: dict[str, Callable[[Service], None]] = {
    "SIGKILL of the launcher": lambda service: service.process.send_signal(signal.SIGKILL),
    "SIGKILL of the process that runs Ray": kill_child,
    "SIGHUP": lambda service: service.process.send_signal(signal.SIGHUP),
    "two interrupts": interrupt_twice,
    "SIGTERM": lambda service: service.process.send_signal(signal.SIGTERM),
}


@pytest.mark.long
@pytest.mark.parametrize("kill", KILLS)
def test_no_process_is_left_and_the_port_is_free_after(kill: str, tmp_path: Path) -> None:
    service = Service(yaml.safe_load((ROOT / "configs/local.yaml").read_text()), tmp_path)
    try:
        begun = time.monotonic()
        KILLS[kill](service)
        limit_s = IDLE_S if kill == "SIGTERM" else GONE_S
        while left := service.processes():
            assert time.monotonic() - begun < limit_s, left
            time.sleep(0.1)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", service.config["http_options"]["port"]))
        service.process.wait(timeout=GONE_S)
    finally:
        service.kill()
