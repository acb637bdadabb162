"""Check of sockets, tokens, keys and ports that others could use."""

from pathlib import Path

import pytest

from serve_app.cli.checks.finding import Finding
from serve_app.cli.checks.needs import Needs, read_needs
from serve_app.cli.checks.private_files import check_private_files
from serve_app.cli.machine import Owned
from serve_app.ingress.haproxy import FOLDER
from tests.serve_app.cli.checks.machines import FakeMachine, case
from tests.serve_app.cli.services import config, write

TOKEN = "/home/me/auth_token"
SOCKETS = {
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "/run/own/a.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "/run/own/m.sock",
}


def check(owners: dict[str, Owned], needs: Needs | None = None) -> Finding:
    machine = FakeMachine(environment={"RAY_AUTH_TOKEN_PATH": TOKEN}, owners=owners)
    return check_private_files(case(machine, needs))


def test_all_is_closed_or_not_there_yet() -> None:
    assert check({}).level == "ok"
    closed = {TOKEN: Owned(True, 0o600), str(FOLDER): Owned(True, 0o700), "/keys.yaml": Owned(True, 0o644)}
    assert check(closed, Needs(keys_files=(Path("/keys.yaml"),))).level == "ok"


@pytest.mark.parametrize(
    ("owners", "needs", "text", "fix"),
    [
        ({TOKEN: Owned(True, 0o644)}, Needs(), "run code as this user", f"chmod 600 {TOKEN}"),
        ({str(FOLDER): Owned(False, 0o700)}, Needs(), "belongs to another user", f"remove {FOLDER}"),
        ({"/run/own": Owned(True, 0o755)}, Needs(variables=SOCKETS), "take the service's port", "chmod 700"),
        ({"/k": Owned(False, 0o666)}, Needs(keys_files=(Path("/k"),)), "can add an API key", "chmod go-w /k"),
    ],
)
def test_a_problem_names_its_fix(owners: dict[str, Owned], needs: Needs, text: str, fix: str) -> None:
    found = check(owners, needs)
    assert found.level == "problem"
    assert text in found.text
    assert fix in found.fix


def test_sessions_of_ray_in_the_folder_of_another_user_are_a_warning() -> None:
    assert check({"/tmp/ray": Owned(True, 0o777)}).level == "ok"
    found = check({"/tmp/ray": Owned(False, 0o1777)})
    assert found.level == "warning"
    assert "RAY_TMPDIR" in found.fix


def test_the_start_closes_its_own_folder() -> None:
    assert check({str(FOLDER): Owned(True, 0o755)}).level == "ok"


@pytest.mark.parametrize(("host", "level"), [("127.0.0.1", "ok"), ("*", "warning"), ("10.0.0.1", "warning")])
def test_statistics_on_all_interfaces_are_a_warning(host: str, level: str) -> None:
    found = check({}, Needs(variables={"SATURATE_HAPROXY_STATISTICS_HOST": host}))
    assert found.level == level
    assert ("SATURATE_HAPROXY_STATISTICS_HOST" in found.fix) == (level != "ok")


def test_a_config_that_has_no_limits_is_a_warning(tmp_path: Path) -> None:
    content = config()
    assert check({}, read_needs(write(tmp_path, content))).level == "ok"
    content["controller_options"] = {
        "runtime_env": {"env_vars": {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": ""}}
    }
    found = check({}, read_needs(write(tmp_path, content)))
    assert found.level == "warning"
    assert "serve_app.ingress.haproxy.prepare" in found.fix


def test_the_keys_of_a_config_are_looked_at(tmp_path: Path) -> None:
    content = config()
    content["applications"][0]["args"]["access"] = {"keys_file": "/k"}
    assert read_needs(write(tmp_path, content)).keys_files == (Path("/k"),)


def test_what_the_machine_says(tmp_path: Path) -> None:
    from serve_app.cli.machine import MachineFacts

    file = tmp_path / "file"
    assert MachineFacts().owned(file) is None
    file.touch(0o640)
    file.chmod(0o640)
    assert MachineFacts().owned(file) == Owned(True, 0o640)
    link = tmp_path / "link"
    link.symlink_to(file)
    assert MachineFacts().owned(link) == Owned(False, 0o640)
