"""The demo's questions: all of them, the split, and the file in the repository."""

import json
from pathlib import Path

from serve_app.demo import questions


def test_there_are_20000_different_questions() -> None:
    assert len(set(questions.all_questions())) == 20_000


def test_the_prompt_and_the_answer_of_a_question() -> None:
    answers = {question.prompt: question.answer for question in questions.all_questions()}
    expected = {"What is 47+28?": "75", "What is 12-40?": "-28", "What is 99+99?": "198", "What is 0-0?": "0"}
    assert answers.items() >= expected.items()


def test_the_file_is_what_the_module_writes(tmp_path: Path) -> None:
    again = tmp_path / "questions.jsonl"
    questions.main(["--out", str(again)])
    assert again.read_bytes() == questions.QUESTIONS_FILE.read_bytes()


def test_the_file_holds_500_different_right_answers() -> None:
    lines = [json.loads(line) for line in questions.QUESTIONS_FILE.read_text(encoding="utf-8").splitlines()]
    assert len({line["prompt"] for line in lines}) == len({line["id"] for line in lines}) == len(lines) == 500
    for line in lines:
        sum_in_words = line["prompt"].removeprefix("What is ").removesuffix("?")
        operator = "+" if "+" in sum_in_words else "-"
        left, right = map(int, sum_in_words.split(operator))
        assert line["answer"] == str(left + right if operator == "+" else left - right)


def test_the_mirror_image_of_a_held_out_question_is_held_out() -> None:
    learn, keep = questions.split_questions(held_out=0.05, seed=0)
    assert len(learn) + len(keep) == 20_000
    assert 900 < len(keep) < 1100
    assert not {(q.operator, q.right, q.left) for q in keep} & {(q.operator, q.left, q.right) for q in learn}
