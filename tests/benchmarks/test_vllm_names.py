"""Names of vLLM in other releases, which are small wheels here."""

import zipfile
from pathlib import Path

import pytest

from tests.benchmarks.vllm_names import Name, Sources, differences, main, used

FILES = {
    "vllm/__init__.py": 'LAZY = {"LLM": ".entrypoints.llm:LLM"}\n',
    "vllm/entrypoints/llm.py": "class LLM:\n    def __init__(self, model, *, seed=0): ...\n",
    "vllm/config.py": (
        "class Base:\n    def check(self, value): ...\n"
        "class Config(Base):\n    size: int\n    depth: int = 0\n    def set(self):\n        self.kept = 1\n"
    ),
    "vllm/outputs/__init__.py": "from .request import *\nfrom ..config import Config as Kept\nimport json\n",
    "vllm/outputs/request.py": (
        "try:\n    LIMIT = 3\nexcept ImportError:\n    LIMIT = 4\ndef make(a, b=1, *c, d, **e): ...\n"
    ),
}

SIGNATURES = {
    Name("vllm", "LLM"): "self, model, seed",
    Name("vllm.config", "Config"): "size, depth",
    Name("vllm.config", "Config.check"): "self, value",
    Name("vllm.config", "Config.kept"): "",
    Name("vllm.config", "Config.size"): "",
    Name("vllm.config", "Config.gone"): None,
    Name("vllm.config", "Nothing"): None,
    Name("vllm.outputs", "make"): "a, b, c, d, e",
    Name("vllm.outputs", "Kept.check"): "self, value",
    Name("vllm.outputs", "LIMIT"): "",
    Name("vllm.outputs", "json"): "",
    Name("vllm.outputs", "request.make"): "a, b, c, d, e",
    Name("vllm.outputs.request", ""): "",
    Name("vllm.nowhere", ""): None,
}


def wheel(folder: Path, name: str, **changed: str) -> Path:
    """Make a wheel of `FILES`, of which some have other texts; a file with none is left out."""
    path = folder / f"{name}.whl"
    with zipfile.ZipFile(path, "w") as file:
        for inner, text in (FILES | changed).items():
            if text:
                file.writestr(inner, text)
    return path


@pytest.mark.parametrize("name", SIGNATURES, ids=str)
def test_a_name_is_found_where_it_is_defined(tmp_path: Path, name: Name) -> None:
    assert Sources(wheel(tmp_path, "a")).signature(name) == SIGNATURES[name]


def test_an_installed_package_is_read_like_a_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel(tmp_path, "a")) as file:
        file.extractall(tmp_path / "installed")
    installed = Sources(tmp_path / "installed")
    assert {name: installed.signature(name) for name in SIGNATURES} == SIGNATURES


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no package vllm"):
        Sources(tmp_path)


def test_what_has_moved_is_gone_or_has_another_signature_is_told(tmp_path: Path) -> None:
    changed = {
        "vllm/config.py": "class Config:\n    size: int\n    width: int\n",
        "vllm/outputs/request.py": "",
        "vllm/outputs/__init__.py": "",
        "vllm/other.py": "def make(a): ...\n",
    }
    base, other = Sources(wheel(tmp_path, "a")), Sources(wheel(tmp_path, "b", **changed))
    some = ("Config", "Config.check", "make", "LLM", "Nothing")
    names = {name: "x.py" for name in SIGNATURES if name.path in some}
    assert list(differences(names, base, other)) == [
        (False, "vllm.config:Config: +width, -depth (x.py)"),
        (True, "vllm.config:Config.check: gone (x.py)"),
        (True, "vllm.config:Nothing: in neither of them (x.py)"),
        (True, "vllm.outputs:make: moved to vllm.other (x.py)"),
    ]
    assert list(differences(names, base, base)) == [
        (True, "vllm.config:Nothing: in neither of them (x.py)"),
    ]


def test_imports_guards_and_overridden_methods_are_collected(tmp_path: Path) -> None:
    folder = tmp_path / "serve_app/engine/vllm"
    folder.mkdir(parents=True)
    (folder / "workarounds.py").write_text(
        "def correct(renderer):\n    from vllm.lora import ops\n    import vllm.envs\n"
        '    require(ops, "shrink", "expand")\n    require(renderer, "_decode")\n    require(own, "x")\n'
    )
    (folder / "other.py").write_text(
        "from vllm.config import Config as Theirs\nimport json\nfrom vllmx import a\n"
        "class Mine(Theirs):\n    async def check(self): ...\n    x = 1\n"
    )
    assert set(map(str, used(tmp_path))) == {
        *("vllm.lora:ops", "vllm.lora:ops.shrink", "vllm.lora:ops.expand", "vllm.envs"),
        *("vllm.renderers.hf:HfRenderer._decode", "vllm.config:Config", "vllm.config:Config.check"),
    }


def test_the_installed_vllm_has_every_name_that_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out
    assert "0 gone or moved" in capsys.readouterr().out
