"""A process of vLLM may use AMX, and one without AMX goes on."""

import platform
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from serve_app.system.amx import allow_amx
from tests.progress import run

# arch_prctl(ARCH_GET_XCOMP_PERM): bit 18 is the permission for the tiles.
SCRIPT = """
import ctypes
from serve_app.system.amx import allow_amx

def permitted():
    mask = ctypes.c_ulong()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask)) == 0
    return bool(mask.value & 1 << 18)

print(permitted())
allow_amx()
print(permitted())
"""


def has_amx() -> bool:
    cpus = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and cpus.exists() and "amx_tile" in cpus.read_text()


@pytest.mark.skipif(not has_amx(), reason="the CPU has no AMX")
def test_a_process_may_use_amx() -> None:
    out = run([sys.executable, "-c", SCRIPT])
    assert out.stdout.split() == ["False", "True"], out.stderr


def test_a_cpu_without_amx_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._init_amx", lambda: asked.append(True))
    allow_amx()
    assert asked == []


def test_vllm_loads_it() -> None:
    (point,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "saturate_amx"]
    assert point.load() is allow_amx
