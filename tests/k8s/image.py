"""Builds a target of k8s/Dockerfile without a container engine: python -m tests.k8s.image TARGET FOLDER

Each stage is a layer of overlayfs, and each RUN a program in a root folder. Debian with its own Python, from
debootstrap, stands for the base image. It needs root, Debian's packages and PyPI. PIP_FIND_LINKS, where it is
set, stands for PyTorch's index.
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dockerfile_parse import DockerfileParser  # type: ignore[import-untyped]

from tests.k8s.rendering import K8S, REPOSITORY

DOCKERFILE = K8S / "Dockerfile"
RECORD = "image.json"
"""File with the built image, in the folder of its layers."""

BASE_ENV = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
"""Variables of the base image."""

BASE = """
set -e
debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates bookworm "$1"
ln -s /usr/bin/python3 "$1/usr/local/bin/python"
ln -s /usr/bin/python3 "$1/usr/local/bin/python3"
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
touch "$1/etc/hosts" "$1/etc/resolv.conf"
"""
"""Makes the folder that stands for the base image."""

RUN = """
set -e
lower=$1 upper=$2 work=$3 root=$4 folder=$5 command=$6; shift 6
mkdir -p "$root"
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$upper,workdir=$work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
mount --bind /etc/ssl/certs "$root/etc/ssl/certs"
made=()
while [ $# -gt 0 ]; do  # SOURCE TARGET
    if [ -d "$1" ]; then mkdir -p "$root$2"; else touch "$root$2"; fi
    mount --bind "$1" "$root$2"
    made+=("$root$2")
    shift 2
done
code=0
chroot "$root" /bin/sh -c "cd $folder && $command" || code=$?
for target in "${made[@]}"; do
    umount "$target"
    if [ -d "$target" ]; then rmdir "$target"; else rm "$target"; fi
done
exit $code
"""
"""Runs a command in a layer."""


COPY = """
set -e
mkdir -p "$2" "$4"
mount -t overlay overlay -o "lowerdir=$1" "$2"
cp --archive "$2$3/." "$4"
"""
"""Copies a folder of a stage."""


class ImageError(ValueError):
    """The Dockerfile can't be built; the message names the line."""


@dataclass
class Image:
    """A stage of the Dockerfile.

    Attributes:
        layers: The folders of its layers, the top one first.
        env: Its variables.
        folder: Its working directory.
        user: Id of its user and of the user's group, as USER has them.
        entrypoint: First words of its command.
        command: The other words, which the words of `docker run` replace.
        health: The command of the health check, empty without one.
        health_options: Options of the health check.
        ports: Its ports.
    """

    layers: list[str]
    env: dict[str, str] = field(default_factory=lambda: dict(BASE_ENV))
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    health_options: dict[str, str] = field(default_factory=dict)
    ports: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "Image":
        """Return the image that was built in a folder."""
        return cls(**json.loads((folder / RECORD).read_text()))


@dataclass
class Step:
    """An instruction.

    Attributes:
        line: Its line.
        name: Its name.
        value: What follows.
    """

    line: int
    name: str
    value: str

    def options(self) -> tuple[list[tuple[str, str]], str]:
        """Return the options (`--name=value`), and what follows them."""
        found, rest = [], self.value
        while match := re.match(r"--([a-z-]+)=(\S+)\s+", rest):
            found.append((match[1], match[2]))
            rest = rest[match.end() :]
        return found, rest


def stages(text: str) -> dict[str, list[Step]]:
    """Return the instructions of each stage, FROM first."""
    parser = DockerfileParser(fileobj=io.BytesIO(text.encode()))
    found: dict[str, list[Step]] = {}
    for one in parser.structure:
        if one["instruction"] in ("COMMENT", "ARG"):
            continue
        step = Step(one["startline"] + 1, one["instruction"], one["value"])
        if step.name == "FROM":
            found[step.value.rpartition(" AS ")[2]] = []
        found[list(found)[-1]].append(step)
    return found


def sent() -> list[str]:
    """Return the paths that .dockerignore lets through to a builder."""
    lines = (K8S / "Dockerfile.dockerignore").read_text().splitlines()
    return [line[1:] for line in lines if line.startswith("!")]


class Builder:
    """Builds stages in a folder.

    Args:
        folder: Folder for the layers, on a file system that overlayfs can use; None: only read what
            the images are.
        text: The Dockerfile.
    """

    def __init__(self, folder: Path | None, text: str) -> None:
        self._reads = folder is None
        self._folder = folder.resolve() if folder else Path()
        self._stages = stages(text)
        self._built: dict[str, Image] = {}

    def build(self, name: str) -> Image:
        """Build a stage, after those that it needs."""
        if name not in self._built:
            if name not in self._stages:
                raise ImageError(f"no stage {name}")
            self._built[name] = self._build(name)
        return self._built[name]

    def _build(self, name: str) -> Image:
        first, *steps = self._stages[name]
        parent = first.value.rpartition(" AS ")[0]
        before = self.build(parent) if parent in self._stages else Image([self._base()])
        upper = self._folder / name / "upper"
        if not self._reads:
            upper.mkdir(parents=True)
            upper.with_name("work").mkdir()
        image = Image(**{**asdict(before), "layers": [str(upper), *before.layers]})
        for step in steps:
            if not self._reads:
                print(f"{name}: {step.name} {step.value}", flush=True)
            self._do(image, step)
        return image

    def _base(self) -> str:
        base = self._folder / "base"
        if not base.exists() and not self._reads:
            subprocess.run(["bash", "-c", BASE, "base", str(base)], check=True)
        return str(base)

    def _do(self, image: Image, step: Step) -> None:
        match step.name:
            case "RUN":
                self._run(image, step)
            case "COPY":
                self._copy(image, step)
            case "ENV":
                for word in shlex.split(step.value):
                    key, _, value = word.partition("=")
                    image.env[key] = re.sub(r"\$\{?(\w+)\}?", lambda m: image.env.get(m[1], ""), value)
            case "WORKDIR":
                image.folder = step.value
                if not self._reads:
                    (Path(image.layers[0]) / step.value.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = step.value
            case "EXPOSE":
                image.ports += step.value.split()
            case "ENTRYPOINT":
                image.entrypoint, image.command = json.loads(step.value), []
            case "CMD":
                image.command = json.loads(step.value)
            case "HEALTHCHECK":
                options, rest = step.options()
                image.health_options, image.health = dict(options), json.loads(rest.removeprefix("CMD"))
            case _:
                raise ImageError(f"line {step.line}: {step.name}: unknown here; add it to tests/k8s/image.py")

    def _run(self, image: Image, step: Step) -> None:
        options, command = step.options()
        if self._reads:
            return
        binds = [*_find_links()]
        for _, value in options:
            mount = dict(part.partition("=")[::2] for part in value.split(","))
            binds.append((self._source(mount), mount["target"]))
        if os.environ.get("PIP_FIND_LINKS"):
            command = command.replace("--torch-backend=cpu ", "")
        self._script(RUN, image, image.folder, command, *(str(part) for bind in binds for part in bind))

    def _source(self, mount: dict[str, str]) -> Path:
        """Return what is mounted for an option of RUN: a cache, or a file of a stage."""
        if mount.get("type") == "cache":
            cache = Path(os.environ.get("UV_CACHE_DIR", Path.home() / ".cache/uv"))
            cache.mkdir(parents=True, exist_ok=True)
            return cache
        return _in_layers(self.build(mount["from"]), mount["source"])

    def _copy(self, image: Image, step: Step) -> None:
        options, rest = step.options()
        chosen = dict(options)
        *sources, target = rest.split()
        place = Path(image.layers[0]) / str(Path(image.folder, target)).lstrip("/")
        into = target.endswith("/") or len(sources) > 1
        for source in sources:
            if "from" in chosen and self._reads:
                self.build(chosen["from"])
            elif "from" in chosen:
                self._copy_folder(self.build(chosen["from"]), source, place)
            else:
                if source not in sent() and not any(source.startswith(f"{path}/") for path in sent()):
                    raise ImageError(f"line {step.line}: {source} is left out by Dockerfile.dockerignore")
                found = REPOSITORY / source
                if self._reads:
                    found.stat()
                    continue
                self._put(found, place / found.name if into else place)
            if "chmod" in chosen and not self._reads:
                place.chmod(int(chosen["chmod"], 8))

    def _copy_folder(self, image: Image, source: str, target: Path) -> None:
        """Copy a folder of a stage, whose layers it may be spread over."""
        command = ["unshare", "--mount", "bash", "-c", COPY, "copy"]
        places = [":".join(image.layers), str(self._folder / "root"), source, str(target)]
        subprocess.run([*command, *places], check=True)

    def _put(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=left_out)
        else:
            shutil.copy2(source, target)

    def _script(self, script: str, image: Image, *arguments: str) -> None:
        upper, *lower = image.layers
        root = self._folder / "root"
        places = [":".join(lower), upper, str(Path(upper).with_name("work")), str(root)]
        env = {**_network(), **image.env, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(
            ["unshare", "--mount", "bash", "-c", script, "step", *places, *arguments], check=True, env=env
        )


def _in_layers(image: Image, path: str) -> Path:
    """Return a file or folder of an image that one layer holds whole."""
    for layer in image.layers:
        found = Path(layer) / path.lstrip("/")
        if found.exists():
            return found
    raise ImageError(f"{path}: not in the stage")


def _network() -> dict[str, str]:
    """Return what programs need for the network of this machine."""
    names = re.compile(r"(PIP|UV|SSL_CERT)_\w+|\w+_(PROXY|proxy)")
    found = {name: value for name, value in os.environ.items() if names.fullmatch(name)}
    if links := found.get("PIP_FIND_LINKS"):
        found["UV_FIND_LINKS"] = ",".join(links.split())
    return found


def _find_links() -> Iterator[tuple[Path, str]]:
    """Yield the folders with packages, and where they are in the root: at the same place."""
    for link in os.environ.get("PIP_FIND_LINKS", "").split():
        if Path(link).is_dir():
            yield Path(link), link


def missing() -> str:
    """Return what keeps images from being built here, or nothing."""
    if os.geteuid() != 0:
        return "only root can mount layers"
    for program in ("debootstrap", "unshare", "mount"):
        if not shutil.which(program):
            return f"there is no {program} here"
    return ""


def build(target: str, folder: Path, text: str | None = None) -> Image:
    """Build a target of the Dockerfile, and write down what it is.

    Args:
        target: Name of the stage.
        folder: Where the layers are written; it may have a `base` of an earlier build.
        text: The Dockerfile; default: that of the repository.
    """
    image = Builder(folder, text or DOCKERFILE.read_text()).build(target)
    (folder / RECORD).write_text(json.dumps(asdict(image), indent=1))
    return image


def read(target: str, text: str | None = None) -> Image:
    """Return what a target of the Dockerfile is, without building it."""
    return Builder(None, text or DOCKERFILE.read_text()).build(target)


def main(arguments: Sequence[str]) -> Any:
    """Build what the command line names."""
    if reason := missing():
        return reason
    target, folder = arguments
    build(target, Path(folder))
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
