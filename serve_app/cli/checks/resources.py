"""Checks of this machine's resources: open files, shared memory, disk, cores, memory."""

from pathlib import Path

from serve_app.cli.checks.finding import GIB, CheckInput, Finding, combined, gib, ok, problem, warning
from serve_app.ingress.haproxy import LEAST_CONNECTIONS, MAXCONN, connections, open_files
from serve_app.settings.environment import CONNECTIONS as DEFAULT_MAXCONN

SHARED_MEMORY = Path("/dev/shm")

SHARED_LEAST, SHARED_FOR_NCCL = 2 * GIB, GIB
"""Least bytes of shared memory for Ray's object store, and for engines with several GPUs."""

FULL = 0.95
"""Used share of a disk above which Ray refuses to spill objects, or of memory above which it ends workers."""

DISK_LEAST = 5 * GIB

PROCESSES = 2 * GIB
"""Bytes of Ray, Serve, an Ingress replica and an engine, without weights and KV cache."""


def check_open_files(case: CheckInput) -> Finding | None:
    """Check the limit of open files; HAProxy needs many open files."""
    if not case.needs.haproxy:
        return None
    _, hard = case.machine.open_files()
    number = case.needs.variables.get(MAXCONN) or DEFAULT_MAXCONN.value
    wanted = int(number) if number.isdecimal() else LEAST_CONNECTIONS
    least = open_files(min(wanted, LEAST_CONNECTIONS))
    fix = (
        "`ulimit -Hn 65536` as root, `LimitNOFILE=65536` of a systemd unit, or "
        "`--ulimit nofile=65536` of a container"
    )
    if 0 <= hard < least:
        return problem(f"{hard:,} are allowed, and HAProxy needs {least:,}", fix)
    if 0 <= hard < open_files(wanted):
        there = connections({MAXCONN: str(wanted)}, hard)
        text = f"{hard:,} are allowed: HAProxy has {there:,} connections instead of {wanted:,}"
        return warning(f"{text}, which need {open_files(wanted):,} open files", fix)
    return ok("no limit" if hard < 0 else f"{hard:,}")


def check_shared_memory(case: CheckInput) -> Finding:
    """Check the size of the shared memory, in which Ray and NCCL exchange data."""
    space = case.machine.space(SHARED_MEMORY)
    several = [model.id for model in case.needs.llms if (model.engine.tensor_parallel_size or 1) > 1]
    fix = "`--shm-size=8g` of a container; on Kubernetes an emptyDir with `medium: Memory` at /dev/shm"
    text = f"{SHARED_MEMORY} has {gib(space.total)}"
    if several and space.free < SHARED_FOR_NCCL:
        return problem(f"{text}, {gib(space.free)} free; {several[0]} needs a GiB for its GPUs", fix)
    if space.total < SHARED_LEAST:
        return warning(f"{text}; Ray keeps its object store on the disk instead, which is slower", fix)
    if space.free < space.total * (1 - FULL):
        return warning(f"{text}, {gib(space.free)} free", f"remove old files from {SHARED_MEMORY}")
    return ok(f"{gib(space.free)} of {gib(space.total)} free")


def check_disk(case: CheckInput) -> Finding | None:
    """Check the disk space for Ray's session, logs and spilled objects."""
    folder = Path(case.machine.environment.get("RAY_TMPDIR", "/tmp"), "ray")
    space = case.machine.space(folder)
    text = f"{gib(space.free)} of {gib(space.total)} free for {folder}"
    fix = f"remove old sessions in {folder} while no Ray runs, or set RAY_TMPDIR to a larger disk"
    if space.free < space.total * (1 - FULL):
        return problem(f"{text}; Ray refuses to spill objects on a disk that is {FULL:.0%} full", fix)
    if space.free < DISK_LEAST:
        return warning(text, fix)
    return ok(text)


def check_cores(case: CheckInput) -> Finding:
    """Check that Ray has as many cores as the config reserves at its start."""
    cores = case.machine.cores()
    there = f"{cores:g} core{'' if cores == 1 else 's'}"
    if case.address:
        return ok(f"{there} here; the service uses the cores of the cluster")
    wanted = sum(one.cores * one.replicas for one in case.needs.deployments)
    # Ray counts whole cores.
    if wanted > max(1, int(cores)):
        shares = ", ".join(f"{one.name} {one.replicas} x {one.cores:g}" for one in case.needs.deployments)
        return problem(
            f"{there}, and the config reserves {wanted:g} ({shares}): replicas would wait for ever",
            "lower num_cpus of ray_actor_options or the replicas, under `deployments` of the config",
        )
    if cores < 2:
        return warning(f"{there}, for Ray, HAProxy, the Ingress and the engine together", "use two or more")
    return ok(f"{there}; the config reserves {wanted:g}" if wanted else there)


def check_memory(case: CheckInput) -> Finding:
    """Check that the memory is enough for Ray, and for the KV cache of engines on the CPU."""
    memory = case.machine.memory()
    caches = [
        (one.replicas, model.engine.kv_cache_memory_bytes or 0)
        for model in case.needs.llms
        for one in case.needs.deployments
        if one.name == f"Engine:{model.id}" and not one.gpus and model.simulate is None
    ]
    wanted = PROCESSES + sum(replicas * size for replicas, size in caches)
    text = f"{gib(memory.free)} of {gib(memory.total)} free"
    found = []
    if memory.free < wanted:
        found.append(
            problem(
                f"{text}, and a service needs {gib(wanted)} and its weights",
                "end other programs, give the container more memory, or lower engine.kv_cache_memory_bytes",
            )
        )
    if memory.free < memory.total * (1 - FULL):
        found.append(
            problem(
                f"{text}; Ray ends workers once {FULL:.0%} are in use",
                "end other programs, or give the container more memory",
            )
        )
    return combined(found) or ok(text)
