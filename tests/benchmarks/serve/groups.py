"""CPU time and memory of a server's processes, by group."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

CLIENT = "client"

RULES = (
    (CLIENT, "tests.benchmarks.serve.handle"),
    ("EngineCore", "EngineCore"),
    ("Worker", "VLLM::Worker"),
    ("Engine", "ServeReplica:llm:Engine"),
    ("Engine", "ServeReplica:llm:LLMServer"),
    ("Ingress", "ServeReplica:llm:Ingress"),
    ("Ingress", "ServeReplica:llm:OpenAiIngress"),
    ("router", "ServeReplica:llm:LLMRouter"),
    ("HAProxy", "haproxy"),
    ("HTTP proxy", "ProxyActor"),
    ("Ray Serve", "ServeController"),
    ("Ray Serve", "HAProxyManager"),
    ("Ray", "raylet"),
    ("Ray", "gcs_server"),
    ("Ray", "dashboard"),
    ("Ray", "ray::"),
    ("Ray", "ray/_private"),
    ("launcher", "serve_app.cli"),
    ("other", "resource_tracker"),
)
"""Groups, and a part of the title of their processes; the first match counts."""


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU time of processes.

    Attributes:
        cpu_s: CPU seconds so far, by process id.
        groups: Group of each process.
    """

    cpu_s: Mapping[int, float]
    groups: Mapping[int, str]

    def since(self, before: "CpuUsage") -> dict[str, float]:
        """Return the CPU seconds used since `before`, by group."""
        used: dict[str, float] = {}
        for pid, cpu in self.cpu_s.items():
            name = self.groups[pid]
            used[name] = used.get(name, 0.0) + cpu - before.cpu_s.get(pid, 0.0)
        return used


def group(title: str, server: str) -> str:
    """Return the group of a process by its title; without a matching rule it is the server itself."""
    return next((name for name, part in RULES if part in title), server)


def _below() -> list[psutil.Process]:
    """Return all descendants of this process."""
    return psutil.Process(os.getpid()).children(recursive=True)


def usage(server: str) -> CpuUsage:
    """Return the CPU time of this process's descendants.

    Args:
        server: Group of processes without a matching rule.
    """
    cpu: dict[int, float] = {}
    groups: dict[int, str] = {}
    for process in _below():
        try:
            with process.oneshot():
                times = process.cpu_times()
                # Ray and vLLM set the title; the process name is cut off after 15 characters.
                title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        cpu[process.pid] = times.user + times.system
        groups[process.pid] = group(title, server)
    return CpuUsage(cpu, groups)


def memory_mib() -> float:
    """Return the memory of this process's descendants in MiB; shared pages count in proportion."""
    total = 0.0
    for process in _below():
        try:
            total += process.memory_full_info().pss / 2**20
        except psutil.Error:
            continue
    return total
