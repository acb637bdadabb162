"""Check of a Ray cluster, with a dashboard on this machine."""

from collections.abc import Iterator

import pytest

from serve_app.cli.checks.cluster import check_cluster
from serve_app.cli.checks.finding import Finding
from tests.ports import free_port
from tests.serve_app.cli.checks.machines import FakeMachine, case
from tests.serve_app.cli.fake_service import FakeService


@pytest.fixture
def dashboard() -> Iterator[FakeService]:
    service = FakeService(
        lambda path, headers: (200, {"ray_version": "2.60.0"}) if path == "/api/version" else (404, "")
    )
    yield service
    service.stop()


def look(
    address: str | None, dashboard: FakeService | None = None, machine: FakeMachine | None = None
) -> Finding:
    """Return the finding about a cluster, whose dashboard has this machine's port."""
    port = dashboard.port if dashboard else free_port()
    found = check_cluster(case(machine, address=address), port)
    assert found
    return found


def test_without_an_address_there_is_no_cluster() -> None:
    assert check_cluster(case()) is None


@pytest.mark.parametrize("scheme", ["", "ray://", "http://"])
def test_a_cluster_of_this_machine_is_asked_without_a_proxy(
    dashboard: FakeService, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    found = look(f"{scheme}127.0.0.1:{dashboard.port}", dashboard)
    assert (found.level, "has Ray 2.60.0" in found.text) == ("ok", True)


@pytest.mark.parametrize(
    ("status", "body", "level", "text", "fix"),
    [
        (
            200,
            {"ray_version": "2.58.0"},
            "problem",
            "has Ray 2.58.0, and this machine has 2.60.0",
            "ray[serve]==2.58.0",
        ),
        (401, "no", "warning", "doesn't report its version", "--address"),
    ],
)
def test_another_version_or_none_is_a_finding(
    dashboard: FakeService, status: int, body: object, level: str, text: str, fix: str
) -> None:
    dashboard.answer = lambda path, headers: (status, body)
    found = look(f"127.0.0.1:{dashboard.port}", dashboard)
    assert found.level == level
    assert text in found.text
    assert fix in found.fix


@pytest.mark.parametrize(
    ("address", "text", "fix"),
    [
        ("127.0.0.1:6379", "can't be reached", "ray start"),
        *(
            (address, "is not the address", "HOST:6379")
            for address in ("head", "ray://head", "head:port", "http://")
        ),
    ],
)
def test_a_cluster_that_is_not_there_is_a_problem(address: str, text: str, fix: str) -> None:
    found = look(address)
    assert found.level == "problem"
    assert text in found.text
    assert fix in found.fix


def test_auto_is_the_cluster_of_this_machine(dashboard: FakeService) -> None:
    note = {"/tmp/ray/ray_current_cluster": f"127.0.0.1:{dashboard.port}"}
    assert look("auto", dashboard, FakeMachine(texts=note)).level == "ok"
    found = look("auto", dashboard, FakeMachine(environment={"RAY_TMPDIR": "/other"}, texts=note))
    assert (found.level, "no Ray runs" in found.text) == ("problem", True)
