"""Checks of the GPUs: the driver and torch, and their number and memory."""

import re

from serve_app.cli.checks.finding import CheckInput, Finding, ok, problem, warning
from serve_app.cli.machine import MachineFacts
from serve_app.settings.turns import UTILIZATION
from serve_app.system import distribution
from serve_app.system.gpus import VISIBLE, DriverError, visible_gpus


def check_driver(case: CheckInput) -> Finding:
    """Check the NVIDIA driver, and that it supports torch's CUDA version."""
    machine = case.machine
    build = torch_cuda(machine)
    wanted = _wanted(case)
    try:
        devices = machine.devices()
    except DriverError as error:
        text = f"NVIDIA's driver fails: {error}"
        fix = "restart the machine after an update of the driver, or install the driver again"
        return problem(text, fix) if wanted else warning(text, fix)
    if devices is None:
        if wanted:
            return problem(
                f"no GPU here, and the config reserves {wanted:g}",
                "install NVIDIA's driver (in a container: its Container Toolkit), or use a config for a CPU",
            )
        if build:
            return warning(
                f"no GPU: CPU configs only; torch is built for CUDA {build}",
                f"on a machine that stays without a GPU: {distribution.build('cpu')}",
            )
        return ok("no GPU: CPU configs only")
    driver, newest = f"driver {devices.driver}", devices.cuda
    if build is None:
        text = f"{driver}, and torch is a build without CUDA: models run on the CPU"
        fix = distribution.build("gpu")
        return problem(text, fix) if wanted else warning(text, fix)
    needed = _version(build)
    text = f"{driver} runs CUDA up to {newest[0]}.{newest[1]}, and torch is built for {build}"
    if newest[0] < needed[0]:
        return problem(text, f"update the driver to a version for CUDA {needed[0]}")
    if newest < needed:
        return warning(
            text, f"update the driver if a kernel fails: it supports most of CUDA {needed[0]}, not all"
        )
    return ok(f"{driver}, CUDA up to {newest[0]}.{newest[1]}, torch for {build}")


def check_gpus(case: CheckInput) -> Finding | None:
    """Check the number of GPUs and their free memory."""
    try:
        devices = case.machine.devices()
    except DriverError:
        # `check_driver` reports this error.
        return None
    if devices is None:
        return None
    gpus = devices.gpus
    there = visible_gpus(gpus, case.machine.environment.get(VISIBLE))
    wanted = _wanted(case)
    listed = ", ".join(f"{one.number} {one.name} ({_gb(one.free)} of {_gb(one.total)} free)" for one in there)
    if wanted > len(there):
        hidden = f" ({VISIBLE} hides {len(gpus) - len(there)})" if len(there) < len(gpus) else ""
        return problem(
            f"{len(there)} GPUs are visible{hidden}, and the config reserves {wanted:g}: {listed or 'none'}",
            f"lower num_gpus, the replicas or engine.tensor_parallel_size of the config, or set {VISIBLE}",
        )
    holders = ", ".join(f"{one.name} (pid {one.pid}, {_gb(one.memory)})" for one in devices.holders)
    held = f"; in use by {holders}" if holders else ""
    for model in case.needs.llms:
        reserved = case.needs.gpus_of(model.id)
        if not reserved or model.simulate is not None:
            continue
        part = model.engine.gpu_memory_utilization or UTILIZATION
        roomy = sorted(there, key=lambda one: one.free or 0, reverse=True)[: max(1, round(reserved))]
        for one in roomy:
            if one.total and one.free is not None and one.free < part * one.total:
                return problem(
                    f"{model.id} takes {_gb(part * one.total)} of GPU {one.number}, and {_gb(one.free)} are "
                    f"free{held}",
                    "end those processes (`saturate stop`), or lower engine.gpu_memory_utilization",
                )
    if holders and not case.needs.deployments:
        return warning(f"{listed}{held}", "end those processes before a service starts (`saturate stop`)")
    return ok(listed or "no GPU is visible")


def torch_cuda(machine: MachineFacts) -> str | None:
    """Return torch's CUDA version, such as "12.9"; None if torch is built without CUDA."""
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", machine.package_text("torch", "version.py") or "", re.M)
    return found[1] if found else None


def _wanted(case: CheckInput) -> float:
    """Return the number of GPUs that the config reserves here; 0 for a cluster, which may be elsewhere."""
    return 0.0 if case.address else sum(one.gpus * one.replicas for one in case.needs.deployments)


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def _gb(size: float | None) -> str:
    return "?" if size is None else f"{size / 1e9:.1f} GB"
