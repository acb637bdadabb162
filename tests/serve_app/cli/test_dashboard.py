"""Requests to Ray's dashboard."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.cli.dashboard import Dashboard
from tests.ports import free_port


def test_the_dashboard_of_another_service_is_passed_over(
    dashboard: Callable[[dict[str, Any]], list[str]],
) -> None:
    dashboard({"http_options": {"port": 8000}, "applications": {"llm": {"status": "RUNNING"}}})
    assert Dashboard(8001).applications() == {}
    assert Dashboard(8000).applications() == {"llm": {"status": "RUNNING"}}


def test_the_dashboard_is_asked_without_a_proxy_and_for_little_cpu_time(
    dashboard: Callable[[dict[str, Any]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    asked = dashboard({"http_options": {"port": 8000}, "applications": {"llm": {"status": "RUNNING"}}})
    ours, begin = Dashboard(8001), time.process_time()
    for _ in range(20):
        ours.applications()
    # The certificates of a client take 20 ms.
    assert time.process_time() - begin < 20 * 0.015
    assert len(asked) == 20
    assert Dashboard(8000).applications() == {"llm": {"status": "RUNNING"}}


def test_the_config_that_runs_is_one_that_can_be_deployed(
    dashboard: Callable[[dict[str, Any]], list[str]],
) -> None:
    config = {"name": "llm", "import_path": "x:y", "args": {}}
    details: dict[str, Any] = {
        "http_options": {"port": 8000},
        "proxy_location": "EveryNode",
        "target_capacity": None,
        "controller_info": {"node_id": "a"},
        "applications": {"llm": {"status": "RUNNING", "deployed_app_config": config}},
    }
    asked = dashboard(details)
    ours = Dashboard(8000)
    assert Dashboard(8001).config() == {}
    found = ours.config()
    assert found == {
        "proxy_location": "EveryNode",
        "http_options": {"port": 8000},
        "applications": [config],
    }
    assert ours.deploy(found) == ""
    assert asked[-1].startswith('PUT {"proxy_location":"EveryNode"')
    # An application that a program has deployed has no config, and would be lost.
    details["applications"]["other"] = {"status": "RUNNING", "deployed_app_config": None}
    assert ours.config() == {}
