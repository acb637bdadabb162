"""Requests to Ray's dashboard."""

from collections.abc import Callable
from typing import Any

from serve_app.cli.dashboard import Dashboard


def test_the_dashboard_of_another_service_is_passed_over(
    dashboard: Callable[[dict[str, Any]], list[str]],
) -> None:
    dashboard({"http_options": {"port": 8000}, "applications": {"llm": {"status": "RUNNING"}}})
    assert Dashboard(8001).applications() == {}
    assert Dashboard(8000).applications() == {"llm": {"status": "RUNNING"}}


def test_applications_are_taken_down_by_an_empty_config(
    dashboard: Callable[[dict[str, Any]], list[str]],
) -> None:
    asked = dashboard({"http_options": {"port": 8000}, "applications": {"llm": {"status": "RUNNING"}}})
    ours = Dashboard(8000)
    ours.applications()
    ours.take_down()
    assert asked == ["GET", 'PUT {"applications":[]}']


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
