"""Settings that go into a service that runs, or into a config."""

import json
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from serve_app.cli.dashboard import Dashboard
from serve_app.cli.main import saturate
from serve_app.cli.tune_config import RunningConfig
from serve_app.settings.user_config import parse_user_config
from serve_app.tuning.tuner import TunedSettings
from tests.serve_app.tuning.test_load import GUIDELLM

URL = "http://127.0.0.1:8000"

CHOICE = TunedSettings(15, 30, {"ttft_p99_s": 0.5})

APP = {"name": "llm", "args": {"models": [{"id": "m", "source": "org/m"}]}, "deployments": []}

Play = Callable[[dict[str, Any]], list[str]]


def details(*apps: dict[str, Any], port: int = 8000) -> dict[str, Any]:
    """Return what Ray's dashboard says about applications that were deployed with a config."""
    found = {app["name"]: {"status": "RUNNING", "deployed_app_config": app} for app in apps}
    return {"http_options": {"port": port}, "applications": found}


class Deploying(Dashboard):
    """The dashboard of a service that takes a change in some looks.

    Args:
        states: Status of the application and of the deployment at each look; the last one stays.
        refusal: Why a config is refused.
    """

    def __init__(self, *states: tuple[str, str], refusal: str = "") -> None:
        self.states = list(states)
        self.refusal = refusal
        self.deployed: list[Any] = []

    def config(self) -> Any:
        return {"applications": [APP, {"name": "other", "import_path": "mine:app", "args": {"x": 1}}]}

    def deploy(self, config: Any) -> str:
        self.deployed.append(config)
        return self.refusal

    def applications(self) -> Any:
        app, engine = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {"llm": {"status": app, "deployments": {"Engine:m": {"status": engine}}}}


async def test_settings_are_applied_when_every_replica_has_them() -> None:
    dashboard = Deploying(
        ("DEPLOYING", "HEALTHY"), ("RUNNING", "UPDATING"), ("RUNNING", "HEALTHY"), ("DEPLOYING", "")
    )
    await RunningConfig(URL, dashboard, look_s=0.0).apply("m", CHOICE)
    assert dashboard.states == [("DEPLOYING", "")]
    (config,) = dashboard.deployed
    engine = {"name": "Engine:m", "user_config": {"batcher": CHOICE.batcher}}
    app, other = config["applications"]
    assert app == APP | {"deployments": [engine]}
    assert other == dashboard.config()["applications"][1]


@pytest.mark.parametrize(
    ("dashboard", "model", "said"),
    [
        (Deploying(("RUNNING", "UPDATING")), "m", "not all replicas have the settings after"),
        (Deploying(("RUNNING", "HEALTHY")), "n", "the config has no model 'n'"),
        (Deploying(("", ""), refusal="400: no"), "m", "Ray Serve refuses the settings: 400: no"),
    ],
)
async def test_settings_that_do_not_arrive_are_told(dashboard: Deploying, model: str, said: str) -> None:
    with pytest.raises(click.ClickException, match=f"--apply: {said}"):
        await RunningConfig(URL, dashboard, look_s=0.0).apply(model, CHOICE)


def test_a_service_on_this_machine_is_found_by_its_port(dashboard: Play) -> None:
    told = details(APP)
    dashboard(told)
    for url, port in (("http://localhost", 80), ("http://LOCALHOST:81", 81), ("http://[::1]:82", 82)):
        told["http_options"]["port"] = port
        RunningConfig(url)
    with pytest.raises(click.UsageError, match="dashboard of the service's Ray isn't on this machine"):
        RunningConfig("http://localhost:83")


# A config

TUNED = {"max_queue_size": 60, "goals": {"ttft_p99_s": 5.0}}
"""Settings for the load of the report that holds: 16 clients, 8 requests per second."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reports") / "guide.json"
    path.write_text(json.dumps(GUIDELLM))
    return path


def error_of(report: Path, config: Path, model: str = "m") -> str:
    """Put the settings of a report into a config with `saturate tune --write`; return the error, or ""."""
    words = ["tune", "--goal", "ttft_p99<5", "--model", model, "--from", report, "--write", config]
    result = CliRunner().invoke(saturate, [*map(str, words)], standalone_mode=False)
    if result.exception is None:
        assert result.return_value == 0
        return ""
    assert isinstance(result.exception, click.ClickException), result.exception
    return result.exception.message.removeprefix(f"--write {config}: ")


def written(report: Path, config: Path, **deployment: Any) -> tuple[Any, list[Any]]:
    """Return the args and the deployments of a config with the settings.

    Args:
        report: The report.
        config: The file.
        deployment: The deployment of the model; none: the config has no deployments.
    """
    deployments = [{"name": "Ingress"}, {"name": "Engine:m", **deployment}] if deployment else None
    config.write_text(yaml.safe_dump({"applications": [APP | {"deployments": deployments}]}))
    assert error_of(report, config) == ""
    (app,) = yaml.safe_load(config.read_text())["applications"]
    return app["args"], app["deployments"]


def test_settings_go_where_they_restart_nothing(report: Path, tmp_path: Path) -> None:
    user_config = {"batcher": {"capacity_tokens": 9}}
    args, (ingress, engine) = written(report, tmp_path / "c.yaml", user_config=user_config)
    assert (args, ingress) == (APP["args"], {"name": "Ingress"})
    assert engine == {"name": "Engine:m", "user_config": {"batcher": {"capacity_tokens": 9, **TUNED}}}
    parse_user_config(engine["user_config"])


def test_the_target_of_the_scaling_changes(report: Path, tmp_path: Path) -> None:
    scaling: dict[str, Any] = {"max_replicas": 4, "target_ongoing_requests": 2}
    _, (_, engine) = written(report, tmp_path / "c.yaml", autoscaling_config=scaling)
    # A little below the 16 clients.
    assert engine["autoscaling_config"] == {"max_replicas": 4, "target_ongoing_requests": 14}
    # A policy has a target of its own.
    scaling = {"max_replicas": 4, "policy": {"policy_function": "x:Y"}}
    _, (_, engine) = written(report, tmp_path / "c.yaml", autoscaling_config=scaling)
    assert engine["autoscaling_config"] == scaling


def test_a_model_without_a_deployment_gets_one(report: Path, tmp_path: Path) -> None:
    # The key `deployments` is there, without a value.
    _, deployments = written(report, tmp_path / "c.yaml")
    assert deployments == [{"name": "Engine:m", "user_config": {"batcher": TUNED}}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "this is not a config of Ray Serve: it has no list `applications`"),
        ("a: [\n", "this is not YAML: expected the node content"),
        (b"\xff\xfe", "this is not UTF-8"),
        ("applications: [llm]", "applications[0]: must be a mapping, not 'llm'"),
        ("applications: [{args: {models: m}}]", "no application has a list args.models with a model"),
    ],
)
def test_a_file_that_is_no_config_is_told(
    content: str | bytes, said: str, report: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    message = error_of(report, path)
    assert message.startswith(said)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("args: {models: [{id: n}]}", "the config has no model 'm'"),
        ("args: {models: [{id: m}]}, deployments: x", "deployments must be a list, not 'x'"),
        (
            "args: {models: [{id: m}]}, deployments: [{name: 'Engine:m', user_config: [1]}]",
            "user_config must be a mapping, not [1]",
        ),
        (
            "args: {models: [{id: m}]}, deployments: [{name: 'Engine:m', user_config: {batcher: on}}]",
            "batcher must be a mapping, not True",
        ),
    ],
)
def test_a_config_of_another_form_is_told_and_stays(
    app: str, said: str, report: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"applications: [{{{app}}}]")
    assert error_of(report, path) == said
    assert path.read_text() == f"applications: [{{{app}}}]"


def test_a_config_gets_the_settings_and_keeps_its_permissions(report: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    # The text of an editor on Windows, with a secret.
    path.write_bytes(f"# große Änderung\r\n{yaml.safe_dump({'applications': [APP]})}".encode())
    path.chmod(0o600)
    assert error_of(report, path) == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "# große Änderung" in path.read_text()
    (engine,) = yaml.safe_load(path.read_text())["applications"][0]["deployments"]
    assert engine == {"name": "Engine:m", "user_config": {"batcher": TUNED}}


def test_a_config_keeps_its_text_in_any_language(report: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("applications: [{name: größer, args: {models: [{source: 模型/m}]}}]", encoding="utf-8")
    assert error_of(report, path, "模型/m") == ""
    written = path.read_text(encoding="utf-8")
    assert "größer" in written
    assert "Engine:模型/m" in written


def test_a_config_stays_as_it_is_if_the_new_one_does_not_fit(report: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [APP]}))
    before = path.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before.encode()), limits[1]))
    try:
        message = error_of(report, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (message, path.read_text()) == ("File too large", before)
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]
