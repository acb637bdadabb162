"""Runs an image of layers as `docker run` does: namespaces, user, volume, health check."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import psutil

from tests import progress
from tests.k8s.image import Image
from tests.k8s.machine import Machine, Running

LAYOUT = """
set -e
read -r _
layers=$1 upper=$2 work=$3 root=$4 address=$5 names=$6 volume=$7 shm=$8 tmp=$9 user=${10}; shift 10
ip link set lo up
ip address add "$address/24" dev eth0
ip link set eth0 up
ip route add default via "${address%.*}.1"
mkdir -p "$root"
if [ -n "$upper" ]; then
    mount -t overlay overlay -o "lowerdir=$layers,upperdir=$upper,workdir=$work" "$root"
else
    mount -t overlay overlay -o "lowerdir=$layers" "$root"
fi
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755,size=64k tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount -t tmpfs -o "mode=1777,nosuid,nodev,noexec,size=$shm" tmpfs "$root/dev/shm"
[ -z "$tmp" ] || mount -t tmpfs -o mode=1777,nosuid,nodev,noexec tmpfs "$root/tmp"
mount --bind "$volume" "$root/cache"
mount --bind "$names/hosts" "$root/etc/hosts"
mount --bind "$names/resolv.conf" "$root/etc/resolv.conf"
exec chroot --userspec="$user" "$root" "$@"
"""
"""Runs first in a container's namespaces, once its network is there."""

FILES = 65536
"""Open files that Docker allows at least."""


COLLECT_S = 30.0
"""Seconds within which the first process of a container collects an ended process."""


@dataclass(slots=True)
class Container:
    """A container that runs.

    Attributes:
        image: Its image.
        running: Its processes.
        machine: Where it runs.
        volume: The volume at /cache.
        written: What it wrote into its root folder; None: that is read-only.
    """

    image: Image
    running: Running
    machine: Machine
    volume: Path
    written: Path | None

    def execute(self, command: Sequence[str]) -> "CompletedProcess[str]":
        """Run a program in the container, as `docker exec` and the health check do."""
        enter = ["nsenter", "--target", str(self.running.pid), "--net", "--pid", "--mount", "--uts", "--ipc"]
        enter += ["--root", "--wd"]
        user, _, group = self.image.user.partition(":")
        return progress.run(
            [*enter, "--setuid", user, "--setgid", group, "env", "-i", *self.running.env, *command]
        )

    def healthy(self) -> bool:
        """Run the image's health check."""
        return self.execute(self.image.health).returncode == 0

    def wait_healthy(self) -> float:
        """Wait for the health check to succeed; return the seconds that it took."""
        began = time.monotonic()

        def is_so() -> bool:
            assert self.running.process.poll() is None, f"it has ended:\n{self.log()}"
            return self.healthy()

        progress.wait_until(is_so, tell=self.log, every_s=0.5)
        return time.monotonic() - began

    def ask(self, path: str, body: object = None, port: int = 8000) -> tuple[int, str]:
        """Call the service from outside of the container."""
        url = f"http://{self.running.address}:{port}{path}"
        return self.machine.ask(url, body, timeout_s=60)

    def processes(self) -> list[psutil.Process]:
        """Return the processes in the container but the first one."""
        return psutil.Process(self.running.pid).children(recursive=True)

    def stop(self, limit_s: float) -> tuple[int, float]:
        """Do what `docker stop` does; return the exit code and the seconds that it took.

        Args:
            limit_s: Seconds until SIGKILL.
        """
        took = self.running.end(limit_s)
        return self.running.process.returncode, took

    def log(self) -> str:
        """Return what it has printed."""
        return self.running.log.read_text()


def start(
    machine: Machine,
    image: Image,
    folder: Path,
    command: Sequence[str] = (),
    *,
    read_only: bool = False,
    shm: str = "64m",
) -> Container:
    """Start a container.

    Args:
        machine: Where it runs.
        image: Its image.
        folder: Folder for the volume and for what it writes, on a file system that overlayfs can use.
        command: What follows the image's name; nothing: the image's own command.
        read_only: `--read-only --tmpfs /tmp`.
        shm: `--shm-size`.
    """
    name = folder.name
    volume, upper, work, root = (folder / part for part in ("volume", "upper", "work", "root"))
    for part in (volume, upper, work, root):
        part.mkdir(parents=True, exist_ok=True)
    user, _, group = image.user.partition(":")
    # A new volume gets the owner of the image's folder.
    os.chown(volume, int(user), int(group))
    env = [f"{key}={value}" for key, value in ({"HOSTNAME": name} | image.env).items()]
    layers = [":".join(image.layers), "" if read_only else str(upper), str(work), str(root)]
    entry = [*image.entrypoint, *(command or image.command)]
    script = f'ulimit -n {FILES}; cd "$0"; exec "$@"'
    program = ["env", "-i", *env, "sh", "-c", script, image.folder, *entry]
    last = [str(folder.parent), str(volume), shm, "tmp" if read_only else "", image.user, *program]
    running = machine.launch(name, LAYOUT, layers, last, env=env)
    # The layout is done when the image's own first process is there.
    progress.wait_until(
        lambda: running.process.poll() is not None or _name(running.pid) == image.entrypoint[0]
    )
    return Container(image, running, machine, volume, None if read_only else upper)


def _name(pid: int) -> str:
    """Return the name of a process; empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).name()
    return ""


def leave_an_orphan(container: Container) -> None:
    """Have a process in a container lose its parent; return when the first process has collected it."""
    container.execute(["sh", "-c", "sleep 0.2 & exit"])
    # The service works meanwhile, which is no progress of this wait.
    progress.wait_until(lambda: "sleep" not in names(container), most_s=COLLECT_S, every_s=0.1)


def names(container: Container) -> list[str]:
    """Return the names of the processes in a container, also of those that ended and were not collected."""
    found = []
    for one in container.processes():
        with suppress(psutil.NoSuchProcess):
            found.append(one.name())
    return found
