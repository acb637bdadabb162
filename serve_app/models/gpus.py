"""The GPUs of a machine, as `nvidia-smi` tells them."""

from collections.abc import Sequence
from typing import NamedTuple

MIB = 1 << 20

FIELDS = "index,uuid,name,memory.total,memory.reserved,memory.used,memory.free,compute_cap,mig.mode.current"

QUERY = ("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
"""The command whose output `read_gpus` reads."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the GPUs which CUDA shows."""


class GPU(NamedTuple):
    """A GPU.

    Attributes:
        number: Its number.
        uuid: Its id.
        name: As its maker calls it.
        total: Bytes of its memory; None: it doesn't tell.
        reserved: Bytes that the driver has.
        used: Bytes that programs have.
        free: Bytes that are free; None: it doesn't tell.
        capability: CUDA's compute capability, such as 8.9; None: not known.
        is_divided: It is divided into slices by MIG.
    """

    number: str
    uuid: str
    name: str
    total: int | None
    reserved: int
    used: int
    free: int | None
    capability: float | None
    is_divided: bool


def read_gpus(table: str) -> list[GPU]:
    """Return the GPUs of the table that `QUERY` prints; empty: there are none."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    # A line that isn't a row of the table says that there are no devices.
    return [_gpu(row) for row in rows if len(row) == len(FIELDS.split(","))]


def visible_gpus(gpus: Sequence[GPU], names: str | None) -> list[GPU]:
    """Return the GPUs that CUDA shows to a program: up to the first name that is not one.

    Args:
        gpus: All GPUs.
        names: `CUDA_VISIBLE_DEVICES`: indexes, ids or their beginnings; None: all are shown.
    """
    if names is None:
        return list(gpus)
    shown: list[GPU] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        by_id = name.startswith("GPU-")
        match = [gpu for gpu in gpus if (gpu.uuid.startswith(name) if by_id else gpu.number == name)]
        if len(match) != 1:
            break
        shown += match
    return shown


def _gpu(row: Sequence[str]) -> GPU:
    number, uuid, name, total, reserved, used, free, capability, mig = row
    return GPU(
        number,
        uuid,
        name,
        _bytes(total),
        _bytes(reserved) or 0,
        _bytes(used) or 0,
        _bytes(free),
        float(capability) if capability.replace(".", "", 1).isdigit() else None,
        mig == "Enabled",
    )


def _bytes(mib: str) -> int | None:
    return int(mib) * MIB if mib.isdigit() else None
