"""Settings that go into a service that runs, or into a config."""

import json
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import yaml

from serve_app.cli import tune_config
from serve_app.cli.tune_config import Change, RunningConfig, read_config, write_config
from serve_app.tuning.goals import parse_goals
from serve_app.tuning.load import Generator, Requests
from serve_app.tuning.service import Service
from serve_app.tuning.tuner import TunedSettings
from serve_app.tuning.workload import TokenLengths

URL = "http://127.0.0.1:8000"

CHOICE = TunedSettings(10.0, 40, 15, 30, {"ttft_p99_s": 0.5})

APP = {"name": "llm", "args": {"models": [{"id": "m", "source": "org/m"}]}, "deployments": []}

Play = Callable[[dict[str, Any]], list[str]]


def details(*apps: dict[str, Any], port: int = 8000) -> dict[str, Any]:
    """Return what Ray's dashboard says about applications that were deployed with a config."""
    found = {app["name"]: {"status": "RUNNING", "deployed_app_config": app} for app in apps}
    return {"http_options": {"port": port}, "applications": found}


def deployed(asked: list[str]) -> list[Any]:
    """Return the configs that the dashboard was asked to deploy."""
    return [json.loads(each.removeprefix("PUT ")) for each in asked if each.startswith("PUT ")]


class Replicas(httpx.MockTransport):
    """The replicas of a service, whose `max_running` is another one at each look.

    Args:
        details: What the dashboard says, for the state of the deployment.
        looks: `max_running` of each replica and the state of the deployment, in turn; the last one stays.
    """

    def __init__(self, details: dict[str, Any], *looks: tuple[tuple[int, ...], str]) -> None:
        super().__init__(self._answer)
        self._details = details
        self.looks = list(looks)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "saturate"}]})
        running, state = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        self._details["applications"]["llm"]["deployments"] = {"Engine:m": {"status": state}}
        idle = {"capacity": 9_000, "running": 0, "queue_depth": 0, "total_submitted": 0}
        entries = [{"batcher": idle | {"max_running": each}} for each in running]
        return httpx.Response(200, json={"models": {"m": {"replicas": entries}}})


async def apply(replicas: Replicas, *choices: TunedSettings, model: str = "m") -> list[Change]:
    """Apply choices one after the other."""
    config = RunningConfig(URL)
    requests = Requests("m", TokenLengths(5), TokenLengths(4))
    async with (
        Service(URL, transport=replicas) as service,
        Generator(service, requests, parse_goals("ttft_p99<0.5")) as generator,
    ):
        return [await config.apply(generator, model, choice) for choice in choices]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few looks, without time between them."""
    monkeypatch.setattr(tune_config, "LOOKS", 5)
    monkeypatch.setattr(tune_config, "LOOK_S", 0.0)


@pytest.mark.usefixtures("quick")
async def test_settings_are_applied_when_every_replica_has_them(dashboard: Play) -> None:
    told = details(APP)
    asked = dashboard(told)
    replicas = Replicas(
        told,
        ((64, 64), "HEALTHY"),
        # Ray Serve changes some replicas after the others.
        ((40, 64), "UPDATING"),
        ((40, 40), "UPDATING"),
        ((40, 40), "HEALTHY"),
        ((0, 0), "HEALTHY"),
    )
    (change,) = await apply(replicas, CHOICE)
    assert replicas.looks == [((0, 0), "HEALTHY")]
    assert deployed(asked) == [change.config]


@pytest.mark.usefixtures("quick")
async def test_a_second_change_builds_on_the_first_and_keeps_other_applications(dashboard: Play) -> None:
    other = {"name": "other", "import_path": "mine:app", "args": {"x": 1}}
    told = details(APP, other)
    asked = dashboard(told)
    replicas = Replicas(told, ((40,), "HEALTHY"), ((32,), "HEALTHY"))
    await apply(replicas, CHOICE, TunedSettings(8.0, 32, None, 24, {}))
    first, second = deployed(asked)
    assert first["applications"][1] == second["applications"][1] == other
    (engine,) = second["applications"][0]["deployments"]
    assert engine["user_config"]["batcher"] == {
        "max_running": 32,
        "max_queue_size": 15,
        "goals": CHOICE.goals,
    }


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("look", [((64, 64), "HEALTHY"), ((40, 64), "UPDATING")])
async def test_settings_that_do_not_arrive_are_told(
    look: tuple[tuple[int, ...], str], dashboard: Play
) -> None:
    told = details(APP)
    dashboard(told)
    with pytest.raises(click.ClickException, match=r"--apply: not all replicas have max_running 40 after"):
        await apply(Replicas(told, look), CHOICE)


async def test_a_model_that_the_service_does_not_have_changes_nothing(dashboard: Play) -> None:
    told = details(APP)
    asked = dashboard(told)
    with pytest.raises(click.ClickException, match="--apply: the config has no model 'n'"):
        await apply(Replicas(told, ((64,), "HEALTHY")), CHOICE, model="n")
    assert deployed(asked) == []


def test_a_service_on_this_machine_is_found_by_its_port(dashboard: Play) -> None:
    told = details(APP)
    dashboard(told)
    for url, port in (("http://localhost", 80), ("http://LOCALHOST:81/v1", 81), ("http://[::1]:82", 82)):
        told["http_options"]["port"] = port
        RunningConfig(url)
    with pytest.raises(click.UsageError, match="dashboard of the service's Ray isn't on this machine"):
        RunningConfig("http://localhost:83")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://gpu-7:8000", "gpu-7 isn't this machine; run the command there"),
        ("ftp://localhost", "ftp://localhost: must begin with http://"),
        ("http://127.0.0.1:80000", "http://127.0.0.1:80000: is no URL: Port out of range"),
        ("http://[::1:8000", "http://[::1:8000: is no URL: "),
    ],
)
def test_a_url_of_no_service_on_this_machine_is_told(url: str, said: str) -> None:
    with pytest.raises(click.UsageError) as told:
        RunningConfig(url)
    assert told.value.message.startswith(f"--apply: {said}")


def model(text: str) -> str:
    return f"applications: [{{args: {{models: [{text}]}}}}]"


def deployment(text: str) -> str:
    return f"applications: [{{deployments: [{text}]}}]"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "this is no config of Ray Serve: it has no list `applications`"),
        ("[]", "this is no config of Ray Serve: it has no list `applications`"),
        ("applications: llm", "this is no config of Ray Serve: it has no list `applications`"),
        ("a: [\n", "this is not YAML: expected the node content"),
        (b"\xff\xfe", "this is not UTF-8"),
        ("applications: [llm]", "applications[0]: must be a mapping, not 'llm'"),
        ("applications: [{}, {args: x}]", "applications[1].args: must be a mapping, not 'x'"),
        ("applications: [{args: {models: m}}]", "applications[0].args.models: must be a list, not 'm'"),
        (model("org/m"), "applications[0].args.models[0]: must be a mapping, not 'org/m'"),
        (model("{batcher: 40}"), "applications[0].args.models[0].batcher: must be a mapping, not 40"),
        ("applications: [{deployments: }]", "applications[0].deployments: must be a list, not None"),
        (deployment("Ingress"), "applications[0].deployments[0]: must be a mapping, not 'Ingress'"),
        (
            deployment("{user_config: [1]}"),
            "applications[0].deployments[0].user_config: must be a mapping, not [1]",
        ),
        (
            deployment("{user_config: {batcher: on}}"),
            "applications[0].deployments[0].user_config.batcher: must be a mapping, not True",
        ),
    ],
)
def test_a_config_of_another_form_is_told_with_its_field(
    content: str | bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(click.UsageError) as told:
        read_config(path)
    assert told.value.message.startswith(f"--write {path}: {said}")
    assert "\n" not in told.value.message


@pytest.mark.parametrize(("name", "said"), [("nowhere.yaml", "No such file"), (".", "Is a directory")])
def test_a_config_that_cannot_be_read_is_told(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match=f"--write .*: {said}"):
        read_config(tmp_path / name)


def test_parts_that_a_config_leaves_out_have_no_form(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "applications: [{}, {args: }, {args: {models: [{batcher: }]}, deployments: [{user_config: }]}]"
    )
    assert len(read_config(path)["applications"]) == 3


def test_the_config_before_is_kept_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    # The text of an editor on Windows, with a secret.
    before = f"# große Änderung\r\n{yaml.safe_dump({'applications': [APP]})}".encode()
    path.write_bytes(before)
    path.chmod(0o600)
    change = write_config(path, "m", CHOICE)
    kept = tmp_path / "config.yaml.before"
    assert kept.read_bytes() == before
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, kept)] == [0o600, 0o600]
    assert yaml.safe_load(path.read_text()) == change.config
    (engine,) = change.config["applications"][0]["deployments"]
    assert engine["user_config"]["batcher"]["goals"] == {"ttft_p99_s": 0.5}


def test_a_config_keeps_its_text_in_any_language(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("applications: [{name: größer, args: {models: [{source: 模型/m}]}}]", encoding="utf-8")
    write_config(path, "模型/m", CHOICE)
    written = path.read_text(encoding="utf-8")
    assert "größer" in written
    assert "Engine:模型/m" in written


def test_a_config_without_the_model_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [APP]}))
    before = path.read_text()
    with pytest.raises(click.ClickException, match=r"--write .*config\.yaml: the config has no model 'n'"):
        write_config(path, "n", CHOICE)
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]


def test_a_config_whose_copy_cannot_be_written_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [APP]}))
    before = path.read_text()
    (tmp_path / "config.yaml.before").mkdir()
    with pytest.raises(click.ClickException, match=r"--write .*config\.yaml: Is a directory"):
        write_config(path, "m", CHOICE)
    assert path.read_text() == before


def test_a_config_stays_as_it_is_if_the_new_one_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [APP]}))
    before = path.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The copy fits, and the longer new text does not.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before.encode()), limits[1]))
    try:
        with pytest.raises(click.ClickException, match=r"--write .*config\.yaml: File too large"):
            write_config(path, "m", CHOICE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.yaml", "config.yaml.before"]
