from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from serve_app.settings.fields import (
    File,
    Folder,
    FolderOrURL,
    Group,
    Host,
    ModelId,
    NotNegative,
    Positive,
    Seconds,
    ServedId,
    Strict,
    Weight,
)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Positive, [1, 10**6]),
        (NotNegative, [0, 1]),
        (Seconds, [0.001, 60.0, 5]),
        (Weight, [0.5, 3]),
        (ModelId, ["demo", "meta/llama-3.1-8B", "a" * 128]),
        (ServedId, ["demo", "demo:support"]),
        (Group, ["night", "a.b_c-d"]),
        (Host, ["example.org", "a", "10.0.0.1"]),
        (File, ["/etc/keys.yaml"]),
        (Folder, ["/var/lib", "~/batches", "~"]),
        (FolderOrURL, ["/var/lib", "~/batches", "s3://bucket/prefix"]),
    ],
)
def test_what_is_allowed_is_taken_as_it_is(kind: Any, values: list[Any]) -> None:
    for value in values:
        assert TypeAdapter(kind).validate_python(value) == value


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Positive, [0, -1, 1.0, "1", True, None]),
        (NotNegative, [-1, 0.0, False]),
        (Seconds, [0, -1.0, float("inf"), float("nan"), "1"]),
        (Weight, [0, float("nan")]),
        (ModelId, ["", "-demo", "a b", "demo:support", "a" * 129, "demo\n"]),
        (ServedId, ["", ":demo", "a b"]),
        (Group, ["", "a/b", "a" * 65]),
        (Host, ["", "Example.org", "http://example.org", "example.org:80", "-a"]),
        (File, ["keys.yaml", "~/keys.yaml", ""]),
        (Folder, ["batches", "./batches", "~no user/batches", ""]),
        (FolderOrURL, ["batches", "~no user/batches", ""]),
    ],
)
def test_everything_else_is_refused(kind: Any, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValidationError):
            TypeAdapter(kind).validate_python(value)


def test_a_path_that_is_not_absolute_is_told_with_the_fix() -> None:
    with pytest.raises(ValidationError, match="must be an absolute path, or begin with ~/"):
        TypeAdapter(Folder).validate_python("batches")
    with pytest.raises(ValidationError, match="on every node that runs an Ingress"):
        TypeAdapter(File).validate_python("~/keys.yaml")


def test_an_unknown_key_is_refused_and_a_section_does_not_change() -> None:
    class Section(Strict):
        size: int = 1

    with pytest.raises(ValidationError, match="szie"):
        Section.model_validate({"szie": 2})
    with pytest.raises(ValidationError, match="frozen"):
        Section().size = 2
