"""Checks of the ports and of what earlier services have left."""

import os
import socket
from collections.abc import Iterator

import pytest

from serve_app.cli.checks import ports as checks
from serve_app.cli.checks.needs import Needs
from serve_app.cli.checks.ports import check_leftovers, check_ports, ports
from serve_app.cli.machine import Process
from serve_app.cli.runs import MARK, RunningService
from serve_app.system.processes import start_time
from tests.ports import free_port
from tests.serve_app.cli.checks.machines import FakeMachine, case

DEAD = RunningService(8000, 4_000_000, 1, 0)


@pytest.fixture(autouse=True)
def no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """No service of this machine plays a part."""
    monkeypatch.setattr(checks, "find_runs", lambda: [])
    monkeypatch.setattr(checks, "DASHBOARD", [free_port()])


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def plain(port: int) -> Needs:
    return Needs(port=port, haproxy=False)


def living() -> RunningService:
    return RunningService(8000, os.getpid(), start_time(os.getpid()) or 0, 0)


def test_the_ports_of_a_service() -> None:
    machine = FakeMachine(environment={"RAY_SERVE_HAPROXY_STATS_PORT": "9404"})
    variables = {"RAY_SERVE_HAPROXY_METRICS_PORT": "9102"}
    found = list(ports(case(machine, Needs(port=80, variables=variables))))
    assert [one.number for one in found] == [80, 9404, 9102, 8500]
    assert [one.number for one in ports(case(needs=plain(80)))] == [80]


def test_free_ports() -> None:
    port = free_port()
    found = check_ports(case(needs=plain(port)))
    assert found
    assert (found.level, found.text) == ("ok", f"{port} are free")


def test_a_port_of_another_program_names_it(taken: int) -> None:
    found = check_ports(case(needs=plain(taken)))
    assert found
    assert found.level == "problem"
    assert f"port {taken} (HTTP) can't be used: " in found.text
    assert f"(pid {os.getpid()})" in found.text
    assert "http_options.port in the config" in found.fix


def test_a_port_of_haproxy_names_its_variable(taken: int) -> None:
    machine = FakeMachine(environment={"RAY_SERVE_HAPROXY_STATS_PORT": str(taken)})
    found = check_ports(case(machine, Needs(port=free_port(), variables=dict.fromkeys(
        ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"), str(free_port())
    ))))  # fmt: skip
    assert found
    assert found.level == "problem"
    assert "HAProxy's statistics" in found.text
    assert "RAY_SERVE_HAPROXY_STATS_PORT" in found.fix


def test_a_port_of_a_service_is_a_warning(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = living()
    monkeypatch.setattr(checks, "find_runs", lambda: [run])
    monkeypatch.setattr(checks, "environment", lambda pid: {MARK: run.mark})
    found = check_ports(case(needs=plain(taken)))
    assert found
    assert found.level == "warning"
    assert "the saturate service on port 8000" in found.text
    assert "`saturate stop --port 8000`" in found.fix


def test_the_ports_of_one_service_have_a_line_each_and_one_remedy(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = living()
    monkeypatch.setattr(checks, "find_runs", lambda: [run])
    monkeypatch.setattr(checks, "environment", lambda pid: {MARK: run.mark})
    names = (
        "RAY_SERVE_HAPROXY_STATS_PORT",
        "RAY_SERVE_HAPROXY_METRICS_PORT",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    )
    needs = Needs(port=taken, variables=dict.fromkeys(names, str(taken)))
    found = check_ports(case(needs=needs))
    assert found
    lines = found.text.splitlines()
    assert len(lines) == 4
    assert all(name in found.text for name in names)
    assert max(map(len, lines)) < 140
    assert found.fix == "`saturate stop --port 8000` before another service starts, or other ports"


def test_no_port_is_left_for_the_dashboard(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DASHBOARD", [taken])
    found = check_ports(case(needs=plain(free_port())))
    assert found
    assert found.level == "problem"
    assert "Ray's dashboard" in found.text


def test_an_address_of_another_machine() -> None:
    found = check_ports(case(needs=Needs(host="192.0.2.1", port=free_port(), haproxy=False)))
    assert found
    assert found.level == "problem"
    assert "192.0.2.1" in found.text


def test_no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_leftovers(case()).text == "none"
    monkeypatch.setattr(checks, "find_runs", lambda: [living()])
    found = check_leftovers(
        case(FakeMachine(running=[Process(7, 6, "VLLM::EngineCor"), Process(8, 1, "bash")]))
    )
    assert (found.level, found.text) == ("ok", f"a service runs on port 8000 (pid {os.getpid()})")


def test_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_runs", lambda: [DEAD])
    found = check_leftovers(case(FakeMachine(running=[Process(7, 1, "VLLM::EngineCor")])))
    assert found.level == "warning"
    assert "processes of a killed service on port 8000 are left" in found.text
    assert "engines without a service are left: pid 7" in found.text
    assert found.fix == "`saturate stop`\nkill 7"
