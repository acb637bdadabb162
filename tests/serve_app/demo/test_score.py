"""Comparison of answers with a question file."""

import json
from pathlib import Path

import pytest

from serve_app.demo.score import main


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows: list[dict[str, object]] = [
        {"id": f"q{n}", "prompt": f"What is {n}+0?", "answer": str(n)} for n in range(4)
    ]
    return write(tmp_path / "questions.jsonl", rows)


def test_answers_are_compared_by_their_ids(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, object]] = [
        {"id": "q3", "result": "3"},
        {"id": "q0", "result": " 0\n"},
        {"id": "q1", "result": "11"},
    ]
    main([str(write(tmp_path / "answers.jsonl", given)), "--questions", str(questions)])
    printed = capsys.readouterr()
    assert printed.out == "accuracy 50.0%: 2 of 4 right\n"
    assert printed.err == "q1: What is 1+0? 1, not 11\nq2: What is 2+0? was not answered\n"
    # A failed request has no result.
    main(
        [
            str(write(tmp_path / "answers.jsonl", [*given, {"id": "q2", "result": None}])),
            "--questions",
            str(questions),
        ]
    )
    assert capsys.readouterr().err == printed.err


@pytest.mark.parametrize("ids", [["q1", "q1"], ["other"]])
def test_an_id_twice_or_unknown_is_a_mistake(tmp_path: Path, questions: Path, ids: list[str]) -> None:
    answers = write(tmp_path / "answers.jsonl", [{"id": id, "result": "1"} for id in ids])
    with pytest.raises(SystemExit, match="there twice, or no question has it"):
        main([str(answers), "--questions", str(questions)])
