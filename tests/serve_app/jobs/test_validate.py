import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.protocol import JSON
from serve_app.jobs.intake import Findings, sketch, validate
from serve_app.jobs.limits import Limits
from tests.serve_app.jobs.helpers import CHAT, row, text_of

MODELS = ("demo", "other")


def check(folder: Path, *rows: JSON | bytes, endpoint: str = CHAT, **limits: Any) -> Findings:
    path = folder / "in"
    path.write_bytes(text_of(*rows))
    models = MODELS[:1] if endpoint == "/generate" else MODELS
    return validate(path, endpoint, models, Limits(**limits))


def body(**fields: Any) -> JSON:
    return {"body": {"model": "demo"} | fields}


def test_a_valid_file(tmp_path: Path) -> None:
    assert check(tmp_path, row("a"), b"", row("b"))[:3] == (2, "demo", [])
    assert check(tmp_path, row("a"), row("b", **body(model="other")))[:3] == (2, None, [])


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{not json", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'{"a": NaN}', "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (row("x", custom_id=None), "missing_required_parameter", "custom_id"),
        (row("x", custom_id=7), "invalid_type", "custom_id"),
        (row("x", custom_id=""), "invalid_type", "custom_id"),
        (row("a"), "duplicate_custom_id", "custom_id"),
        (row("x", method="GET"), "invalid_method", "method"),
        (row("x", method=None), "missing_required_parameter", "method"),
        (row("x", url="/v1/embeddings"), "mismatched_url", "url"),
        (row("x", body=None), "missing_required_parameter", "body"),
        (row("x", body="text"), "invalid_type", "body"),
        (row("x", body={"messages": []}), "missing_required_parameter", "body.model"),
        (row("x", **body(model=3)), "invalid_type", "body.model"),
        (row("x", **body(model="gpt-9")), "model_not_found", "body.model"),
        (row("x", **body(stream=True)), "invalid_value", "body.stream"),
        (row("x" * 3000), "line_too_long", None),
    ],
)
def test_a_bad_line_is_told_with_its_number(
    tmp_path: Path, bad: JSON | bytes, code: str, param: str | None
) -> None:
    found = check(tmp_path, row("a"), b"", bad, row("b"), max_line_bytes=2000)
    assert [(error["code"], error["line"], error["param"]) for error in found.errors] == [(code, 3, param)]
    assert found.errors[0]["message"]


def test_a_model_may_be_left_out_where_one_is_served(tmp_path: Path) -> None:
    found = check(tmp_path, row("a", url="/generate", body={"prompts": ["x"]}), endpoint="/generate")
    assert found[:3] == (1, None, [])


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    assert [error["code"] for error in check(tmp_path, b"", b" ").errors] == ["empty_file"]


def test_too_many_rows_are_an_error(tmp_path: Path) -> None:
    rows = [row(str(number)) for number in range(4)]
    assert check(tmp_path, *rows, max_lines=4).errors == []
    errors = check(tmp_path, *rows, max_lines=3).errors
    assert [(error["code"], error["line"]) for error in errors] == [("too_many_rows", 4)]


def test_the_number_of_errors_is_bounded(tmp_path: Path) -> None:
    found = check(tmp_path, *([b"{"] * 50), max_errors=7)
    assert [error["line"] for error in found.errors] == [1, 2, 3, 4, 5, 6, 7]
    found = check(tmp_path, *([b"{}"] * 50), max_errors=7)
    assert [error["line"] for error in found.errors] == [1, 1, 1, 1, 2, 2, 2]


def test_memory_does_not_grow_with_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "in"
    filler = "x" * 10_000
    with path.open("wb") as file:
        for number in range(2_000):
            file.write(text_of(row(f"{number}-{filler[:400]}", **body(text=filler))))
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    found = validate(path, CHAT, MODELS, Limits())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.total, found.errors) == (2_000, [])
    assert peak < 5_000_000


def test_a_sketch_says_what_a_validation_would(tmp_path: Path) -> None:
    rows = [row(f"row-{number:04}", **body(max_tokens=100 + number % 7)) for number in range(700)]
    whole = check(tmp_path, *rows)
    found = sketch(tmp_path / "in", CHAT, (tmp_path / "in").stat().st_size)
    assert found.model == whole.model == "demo"
    assert found.work == pytest.approx(whole.work, rel=0.02)


def test_the_work_of_a_row_is_bound_by_what_its_body_asks_for(tmp_path: Path) -> None:
    def work(endpoint: str = CHAT, **fields: Any) -> float:
        return check(tmp_path, row("a", url=endpoint, **body(**fields)), endpoint=endpoint).work

    short = work(max_tokens=10)
    assert work(max_tokens=1010) == pytest.approx(short + 1000, abs=1)
    assert work(max_completion_tokens=10, n=3) == pytest.approx(short + 20, abs=5)
    assert work(max_tokens=10, user="x" * 8000) == pytest.approx(short + 1000, abs=5)
    assert work() > short
    assert work("/v1/embeddings", max_tokens=1000) < short + 10


def test_a_sketch_of_what_can_not_be_read_has_no_model(tmp_path: Path) -> None:
    for text in (b"", b"{", b"[1]", b'{"body": 7}', b'{"body": {"model": 7}}', b"x" * (2 << 20)):
        (tmp_path / "in").write_bytes(text)
        assert sketch(tmp_path / "in", CHAT, len(text)).model is None
