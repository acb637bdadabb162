"""The guard of names that aren't public, and Ray's own."""

import importlib
import os
from pathlib import Path

import pytest

from serve_app.settings.environment import VARIABLES
from serve_app.system import ray_seams, seams


def test_the_installed_ray_has_all_names() -> None:
    ray_seams.check()


def test_ray_serve_reads_each_variable_that_is_set_for_it() -> None:
    folder = Path(importlib.import_module("ray.serve").__file__ or "").parent
    text = "".join(path.read_text() for path in folder.glob("_private/*.py"))
    names = {each.name for each in VARIABLES if each.name.startswith("RAY_SERVE_")}
    assert names
    assert {name for name in names if f'"{name}"' not in text} == set()


def test_what_has_moved_is_named_with_its_use() -> None:
    lost = {
        "nobody": seams.Seam("json", "nothing"),
        "Path": seams.Seam("pathlib", "files", "exists moved_away"),
        "JSONDecoder": seams.Seam("json", "texts", "decode object_hook"),
        "elsewhere": seams.Seam("json.no.such.module", "another thing"),
    }
    with pytest.raises(RuntimeError) as caught:
        seams.look_for(lost, "Python", (3, 11))
    assert str(caught.value) == (
        "Python 3.11 has no json.nobody (nothing); no pathlib.Path.moved_away (files); "
        "no json.no.such.module.elsewhere (another thing). Install the version that pyproject.toml names"
    )


def test_a_name_is_found_where_it_was_before() -> None:
    assert seams.load({"Path": seams.Seam("pathlib.moved", "files", before="pathlib")}, "Path") is Path
    assert seams.load({"path": seams.Seam("os", "a module")}, "path") is os.path


def test_what_a_version_has_ended_is_not_looked_for() -> None:
    ended = {"nobody": seams.Seam("json", "nothing", ends=(3, 11))}
    seams.look_for(ended, "Python", (3, 11))
    with pytest.raises(RuntimeError, match="nobody"):
        seams.look_for(ended, "Python", (3, 10))


def test_a_name_that_is_in_no_table_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nobody"):
        ray_seams.nobody  # noqa: B018
