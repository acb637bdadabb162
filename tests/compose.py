"""Checks a file of Docker Compose; a field that the pages don't use is unknown to the check.

The fields are written by hand from https://docs.docker.com/reference/compose-file/.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tests import commands
from tests.pages import ROOT

Port = Annotated[str, Field(pattern=r"^([0-9.]+:)?[0-9]+:[0-9]+$")]
Mount = Annotated[str, Field(pattern=r"^[^:]+:/[^:]+(:ro)?$")]
Size = Annotated[str, Field(pattern=r"^[0-9]+[bkmg]b?$")]
Seconds = Annotated[str, Field(pattern=r"^[0-9]+s$")]


class Part(BaseModel):
    """A part of the file."""

    model_config = ConfigDict(extra="forbid")


class Device(Part):
    """Devices that a service reserves."""

    driver: Literal["nvidia"]
    count: int | Literal["all"]
    capabilities: list[Literal["gpu"]]


class Reservations(Part):
    """What a service reserves."""

    devices: list[Device]


class Resources(Part):
    """The resources of a service."""

    reservations: Reservations


class Deploy(Part):
    """How a service is placed."""

    resources: Resources


class Service(Part):
    """A service."""

    image: str
    command: list[str]
    ports: list[Port]
    volumes: list[Mount]
    read_only: bool = False
    tmpfs: list[str] = []
    shm_size: Size
    stop_grace_period: Seconds
    restart: Literal["no", "always", "on-failure", "unless-stopped"]
    deploy: Deploy | None = None


class File(Part):
    """The file."""

    services: dict[str, Service]
    volumes: dict[str, dict[str, Any]]


def check(content: object) -> None:
    """Check a file: its fields, the image, the command, the volumes.

    Raises:
        pydantic.ValidationError: A field is unknown or wrong.
        CommandError: The Dockerfile has no such image, or `saturate` no such command.
        ValueError: A volume is not declared, or is not the place of the caches.
    """
    file = File.model_validate(content)
    home = re.findall(r"^ENV HOME=(\S+)", (ROOT / "k8s/Dockerfile").read_text(), re.M)
    for service in file.services.values():
        commands.check_image(service.image)
        commands.check(" ".join(["saturate", *service.command]))
        mounts = {mount.split(":")[1]: mount.split(":")[0] for mount in service.volumes}
        if not set(mounts.values()) <= set(file.volumes):
            raise ValueError(f"volumes: {sorted(mounts.values())} are used, {sorted(file.volumes)} declared")
        if not set(home) <= set(mounts):
            raise ValueError(f"volumes: the caches are in {home}, the volumes at {sorted(mounts)}")
        if service.read_only and "/tmp" not in service.tmpfs:
            raise ValueError("tmpfs: with read_only, /tmp must be one")
