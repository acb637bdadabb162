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
