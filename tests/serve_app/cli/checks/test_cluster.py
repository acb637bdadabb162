"""Check of a Ray cluster, with a dashboard on this machine."""

from collections.abc import Iterator

import pytest

from serve_app.cli.checks import cluster as checks
from serve_app.cli.checks.cluster import check_cluster
from serve_app.cli.checks.finding import Finding
from tests.ports import free_port
from tests.serve_app.cli.checks.machines import FakeMachine, case
from tests.serve_app.cli.fake_service import FakeService


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    service = FakeService(
        lambda path, headers: (200, {"ray_version": "2.60.0"}) if path == "/api/version" else (404, "")
    )
    monkeypatch.setattr(checks, "DASHBOARD_PORT", service.port)
    yield service
    service.stop()


def look(address: str | None, machine: FakeMachine | None = None) -> Finding | None:
    return check_cluster(case(machine, address=address))


def test_without_an_address_there_is_no_cluster() -> None:
    assert look(None) is None


def test_the_same_ray(dashboard: FakeService) -> None:
    for scheme in ("", "ray://", "http://"):
        found = look(f"{scheme}127.0.0.1:{dashboard.port}")
        assert found
        assert (found.level, "has Ray 2.60.0" in found.text) == ("ok", True)


def test_a_cluster_on_this_machine_is_asked_without_a_proxy(
    dashboard: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    found = look(f"127.0.0.1:{dashboard.port}")
    assert found
    assert found.level == "ok"


def test_another_ray(dashboard: FakeService) -> None:
    dashboard.answer = lambda path, headers: (200, {"ray_version": "2.58.0"})
    found = look(f"127.0.0.1:{dashboard.port}")
    assert found
    assert found.level == "problem"
    assert "has Ray 2.58.0, and this machine has 2.60.0" in found.text
    assert "ray[serve]==2.58.0" in found.fix


def test_a_cluster_that_does_not_tell(dashboard: FakeService) -> None:
    dashboard.answer = lambda path, headers: (401, "no")
    found = look(f"127.0.0.1:{dashboard.port}")
    assert found
    assert found.level == "warning"
    assert "doesn't report its version" in found.text


def test_a_cluster_that_is_not_there() -> None:
    found = look(f"127.0.0.1:{free_port()}")
    assert found
    assert found.level == "problem"
    assert "can't be reached" in found.text


@pytest.mark.parametrize("address", ["head", "ray://head", "head:port", "http://"])
def test_an_address_that_is_none(address: str) -> None:
    found = look(address)
    assert found
    assert found.level == "problem"
    assert "HOST:6379" in found.fix


def test_auto_is_the_cluster_of_this_machine(dashboard: FakeService) -> None:
    note = {"/tmp/ray/ray_current_cluster": f"127.0.0.1:{dashboard.port}"}
    found = look("auto", FakeMachine(texts=note))
    assert found
    assert found.level == "ok"
    found = look("auto", FakeMachine(environment={"RAY_TMPDIR": "/other"}, texts=note))
    assert found
    assert (found.level, "no Ray runs" in found.text) == ("problem", True)
