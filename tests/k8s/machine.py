"""Pods in namespaces of this machine, as a container sees Kubernetes and KubeRay, without either.

Each pod has an address, processes, a /dev/shm and a /tmp/ray of its own; what starts in it is what KubeRay
would start. Where Linux lets every user make namespaces, it needs no rights.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import progress
from tests.k8s.rendering import REPOSITORY

IMAGE = os.environ.get("SATURATE_IMAGE", "")
"""The unpacked root of the image `cpu`, for pods that run from it; else they run what is installed here."""

NET = "10.77.0"
"""The pods' network; nothing outside of their namespaces sees it."""

AGENT, METRICS = 52365, 8080
"""Ports that KubeRay has Ray listen on."""

LAYOUT = """
set -e
read -r _
root=$1 address=$2 names=$3 shm=$4; shift 4
ip link set lo up
ip address add "$address/24" dev eth0
ip link set eth0 up
ip route add default via "${address%.*}.1"
if [ -n "$root" ]; then
    mount --rbind /dev "$root/dev"
    mount --rbind /sys "$root/sys"
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
fi
mkdir -p "$root/tmp/ray"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp/ray"
mount -t tmpfs -o "mode=1777,size=$shm" tmpfs "$root/dev/shm"
mount --bind "$names/hosts" "$root/etc/hosts"
mount --bind "$names/resolv.conf" "$root/etc/resolv.conf"
[ -z "$root" ] || exec chroot --userspec=1000:1000 "$root" "$@"
exec "$@"
"""
"""Runs first in a pod's namespaces, once its network is there."""

ASK = """
import json, sys, urllib.error, urllib.request
url, method, body, timeout, headers = json.load(sys.stdin)
data = None if body is None else json.dumps(body).encode()
request = urllib.request.Request(url, data, {"content-type": "application/json"} | headers, method=method)
try:
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        seen = [answer.status, answer.read().decode()]
except urllib.error.HTTPError as error:
    seen = [error.code, error.read().decode()]
except OSError as error:
    seen = [0, str(error)]
print(json.dumps(seen))
"""


def missing() -> str:
    """Return what keeps pods from running here, or nothing."""
    for program in ("unshare", "nsenter", "ip", "mount"):
        if not shutil.which(program):
            return f"there is no {program} here"
    done = subprocess.run(
        ["unshare", *_rights(), "--net", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return done.stderr.strip()


def _rights() -> list[str]:
    """Return what makes a user root of its own namespaces; root is root already."""
    return [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


def start_command(group: Mapping[str, Any], head: str = "") -> str:
    """Return what KubeRay has a container run.

    Args:
        group: The group of the pod.
        head: Name of the head's service; nothing: this is the head.
    """
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    options = {
        "dashboard-agent-listen-port": str(AGENT),
        "metrics-export-port": str(METRICS),
        "block": "true",
        "memory": str(int(limits["memory"].removesuffix("Gi")) << 30),
        "num-cpus": limits["cpu"],
    } | group["rayStartParams"]
    # The autoscaler of a cluster on Kubernetes is a container beside the head.
    options |= {"address": f"{head}:6379"} if head else {"head": "true", "no-monitor": "true"}
    flags = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in options.items()]
    return f"ulimit -n 65536; ray start {' '.join(flags)}"


@dataclass(slots=True)
class Running:
    """A pod that runs.

    Attributes:
        name: Its host name.
        address: Its address.
        container: The first container of its template.
        process: Ends with the pod.
        pid: The first process in it, as it is seen from here.
        log: What it prints.
        env: What its processes have in their environment.
        link: Its end of the network.
    """

    name: str
    address: str
    container: dict[str, Any]
    process: "subprocess.Popen[str]"
    pid: int
    log: Path
    env: list[str]
    link: str

    def probe(self, machine: "Machine", name: str) -> bool:
        """Do what the kubelet does for a probe; return whether it succeeds."""
        probe = self.container[name]
        get = probe["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        port = ports.get(get["port"], get["port"])
        status, _ = machine.ask(
            f"http://{self.address}:{port}{get['path']}", timeout_s=probe["timeoutSeconds"]
        )
        return 200 <= status < 400

    def run(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a program in the pod."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--pid", "--mount", "--uts"]
        enter += ["--root", "--wd"] if IMAGE else []
        enter += [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        enter += ["--setuid", "1000", "--setgid", "1000"] if IMAGE else []
        return progress.run([*enter, "env", "-i", *self.env, *command])

    def end(self, grace_s: float) -> float:
        """End the pod as the kubelet does; return the seconds that it took."""
        began = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(self.pid, 15)
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.lose()
        return time.monotonic() - began

    def lose(self) -> None:
        """End all processes of the pod at once."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        self.process.wait(progress.STILL_S)


class Machine:
    """A machine's worth of pods, with a network between them.

    Args:
        folder: Where logs, and the hosts that the pods know, are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 1
        self._pods: list[Running] = []
        self._programs: list[subprocess.Popen[str]] = []
        self._names: dict[str, str] = {"localhost": "127.0.0.1"}
        self._hosts = folder / "hosts"
        self._write_hosts()
        # A look-up of another name fails at once.
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        self._holder = subprocess.Popen(
            ["unshare", *_rights(), "--net", "--mount", "sleep", "infinity"], stdin=subprocess.DEVNULL
        )
        comm = Path(f"/proc/{self._holder.pid}/comm")
        progress.wait_until(lambda: comm.read_text().strip() == "sleep", every_s=0.02)
        self._ip("link", "set", "lo", "up")
        self._ip("link", "add", "pods", "type", "bridge")
        self._ip("address", "add", f"{NET}.1/24", "dev", "pods")
        self._ip("link", "set", "pods", "up")

    def start(
        self,
        name: str,
        group: Mapping[str, Any],
        head: str = "",
        secrets: Mapping[str, str] | None = None,
        token: str = "",
    ) -> Running:
        """Start a pod.

        Args:
            name: Its name.
            group: Its group.
            head: Name of the head's service; nothing: this is a head.
            secrets: What the Secrets have that its environment names, by key.
            token: Ray's token; nothing: Ray asks for none.
        """
        command = start_command(group, head)
        container = group["template"]["spec"]["containers"][0]
        env = self._env(container, head or name, secrets or {}, token)
        entry = ["env", "-i", *env, "bash", "-c", command]
        return self.launch(name, LAYOUT, [IMAGE], [str(self._folder), _shm(group), *entry], container, env)

    def launch(
        self,
        name: str,
        layout: str,
        first: Sequence[str],
        last: Sequence[str],
        container: dict[str, Any] | None = None,
        env: Sequence[str] = (),
    ) -> Running:
        """Start a program in namespaces of its own, with an address in the pods' network.

        Args:
            name: The host name.
            layout: A script, which runs first in the namespaces, reads a line once its network is there, and
                becomes the program.
            first: Arguments of the script, before the address.
            last: Arguments behind the address.
            container: The container of a pod's template.
            env: What its processes have in their environment.
        """
        self._count += 1
        address = f"{NET}.{self._count}"
        self.name(name, address)
        log = self._folder / f"{name}.log"
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = ["bash", "-c", layout, "layout", *first, address, *last]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*self._inside(), "unshare", *namespaces, *script],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        shell = psutil.Process(process.pid)
        progress.wait_until(lambda: [each.name() for each in shell.children()] == ["bash"], every_s=0.02)
        pid = shell.children()[0].pid
        link = f"pod{self._count}"
        self._ip("link", "add", link, "master", "pods", "type", "veth", "peer", "eth0", "netns", str(pid))
        self._ip("link", "set", link, "up")
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.close()
        pod = Running(name, address, container or {}, process, pid, log, list(env), link)
        self._pods.append(pod)
        return pod

    def name(self, name: str, address: str) -> None:
        """Have a name, of a pod or a service, mean an address, in all pods."""
        self._names[name] = address
        self._write_hosts()

    def ask(
        self,
        url: str,
        body: object = None,
        method: str = "",
        timeout_s: float = 10.0,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        """Call a pod from outside of it; return the status and the answer, or 0 and why there is none."""
        method = method or ("GET" if body is None else "POST")
        done = progress.run(
            [*self._inside(), sys.executable, "-I", "-S", "-c", ASK],
            input=json.dumps([url, method, body, timeout_s, dict(headers or {})]),
            check=True,
        )
        status, text = json.loads(done.stdout)
        return status, text

    def unplug(self, pod: Running) -> None:
        """Cut a pod off: no packet reaches it or leaves it, and no connection is closed."""
        self._ip("link", "set", pod.link, "down")

    def block(self, pod: Running, target: Running, opened: Sequence[tuple[int, int]]) -> None:
        """Keep a pod from connecting to another, but for some ranges of ports, as a network policy does.

        Args:
            pod: The pod that connects.
            target: The pod that listens.
            opened: First and last port of each range, in order.
        """
        first = 1
        # Linux takes no range of a rule that reaches port 65535, so that one stays open.
        for start, end in (*opened, (65535, 65535)):
            if first < start:
                rule = ["to", target.address, "ipproto", "tcp", "dport", f"{first}-{start - 1}", "prohibit"]
                user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
                enter = ["nsenter", "--target", str(pod.pid), *user, "--net", "--"]
                subprocess.run([*enter, "ip", "rule", "add", *rule], check=True, timeout=progress.STILL_S)
            first = end + 1

    def program(self, module: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start a module of these tests in the pods' network; it ends with the pods at the latest."""
        program = subprocess.Popen(
            [*self._inside(), sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        self._programs.append(program)
        return program

    def stop(self) -> None:
        """End all programs and pods, and the network."""
        for program in self._programs:
            program.kill()
            program.wait()
        for pod in self._pods:
            pod.lose()
        self._holder.kill()
        self._holder.wait()

    def _inside(self) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._holder.pid), *user, "--net", "--"]

    def _ip(self, *arguments: str) -> None:
        subprocess.run([*self._inside(), "ip", *arguments], check=True, timeout=progress.STILL_S)

    def _env(
        self, container: Mapping[str, Any], head: str, secrets: Mapping[str, str], token: str
    ) -> list[str]:
        if IMAGE:
            path, home = "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin", "/cache"
        else:
            path, home = f"{Path(sys.executable).parent}:{os.environ['PATH']}", str(self._folder)
        variables = {
            "PATH": path,
            "HOME": home,
            "PYTHONUNBUFFERED": "1",
            # Variables that KubeRay adds.
            "RAY_PORT": "6379",
            "FQ_RAY_IP": head,
            "RAY_IP": head,
            "RAY_ADDRESS": f"{head}:6379",
            "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        }
        if token:
            variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        for variable in container.get("env", []):
            source = variable.get("valueFrom")
            variables[variable["name"]] = (
                variable["value"] if source is None else secrets[source["secretKeyRef"]["key"]]
            )
        return [f"{name}={value}" for name, value in variables.items()]

    def _write_hosts(self) -> None:
        # In place: the pods have this very file.
        self._hosts.write_text("".join(f"{address} {name}\n" for name, address in self._names.items()))


def _shm(group: Mapping[str, Any]) -> str:
    """Return the size of a pod's /dev/shm; a container's own has 64 MiB."""
    for volume in group["template"]["spec"].get("volumes", []):
        if volume["name"] == "shm":
            size: str = volume["emptyDir"]["sizeLimit"]
            return size.removesuffix("i")
    return "64M"
