import pytest

from serve_app.api.protocol import JSON
from serve_app.settings.schema import parse
from tests.serve_app.settings.helpers import mistakes, one


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "args.batches.folder: required, but missing"),
        ({"folder": "batches"}, "args.batches.folder: must be an absolute path"),
        ({"content": "here"}, "args.batches.content: must be an absolute path"),
        ({"database": "mysql://x"}, "args.batches.database: must be a URL such as postgresql://"),
        (
            {"database": "postgresql://x/y", "database_env": "X"},
            "args.batches: give database or database_env",
        ),
        ({"max_lines": 0}, "args.batches.max_lines: "),
        ({"retention_s": 10}, "args.batches.retention_s: "),
        ({"max_file_bytes": 5}, "args.batches: max_line_bytes: must be at most max_file_bytes, which is 5"),
        ({"max_batches": 9}, "args.batches: max_open_batches: must be at most max_batches, which is 9"),
        ({"lines": 5}, "args.batches.lines: unknown key; did you mean max_lines or deadlines?"),
    ],
)
def test_wrong_batches_are_told_with_the_fix(fields: JSON, line: str) -> None:
    (found,) = mistakes(one() | {"batches": ({"folder": "/x"} if fields else {}) | fields})
    assert found.startswith(line)


def test_batches_may_be_in_a_home() -> None:
    settings = parse(one() | {"batches": {"folder": "~/x", "content": "s3://bucket/x"}})
    assert settings.batches
    assert settings.batches.folder == "~/x"
