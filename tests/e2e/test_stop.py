import threading

import httpx
import pytest

from tests.e2e.service import Service


def test_sigterm_finishes_what_is_in_flight_and_leaves_no_process_behind(
    service: Service, http: httpx.Client
) -> None:
    before = service.processes()
    for name in ("raylet", "haproxy", "EngineCore", "ServeController"):
        assert any(name in line for line in before), f"{name} not among {before}"
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompts": ["once upon"] * 20, "max_tokens": 1000, "ignore_eos": True, "model": "demo"}
        answers.append(httpx.post(f"{service.url}/generate", json=body, timeout=120))

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(500):
        (replica,) = http.get("/stats").json()["models"]["demo"]["replicas"]
        if replica["batcher"]["running"] == 20:
            break
    else:
        pytest.fail("the request did not start")

    assert service.stop() == 0

    asking.join(timeout=10)
    assert [answer.status_code for answer in answers] == [200]
    assert service.processes() == []
