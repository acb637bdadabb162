"""Score of the answers to a question file: the share that is exactly right.

``python -m serve_app.demo.score answers.jsonl`` scores what `saturate batch` wrote for the demo's questions.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serve_app.demo.questions import QUESTIONS_FILE


def score(answers: Path, questions: Path) -> tuple[int, int, list[str]]:
    """Compare answers with the expected answers, by id.

    Args:
        answers: The output of `saturate batch`, as JSON lines.
        questions: JSON lines with an `id`, a `prompt` and an `answer`.

    Returns:
        The number of right answers, the number of questions, and a line for each wrong answer.

    Raises:
        ValueError: An id occurs twice, or is unknown.
    """
    asked = {row["id"]: row for row in _rows(questions)}
    given: dict[str, str | None] = {}
    for row in _rows(answers):
        if row["id"] in given or row["id"] not in asked:
            raise ValueError(f"{answers}: the id {row['id']!r} is there twice, or no question has it")
        given[row["id"]] = row["result"]
    wrong = []
    for id, question in asked.items():
        answer = given.get(id)
        if answer is None:
            wrong.append(f"{id}: {question['prompt']} was not answered")
        elif answer.strip() != question["answer"]:
            wrong.append(f"{id}: {question['prompt']} {question['answer']}, not {answer.strip()}")
    return len(asked) - len(wrong), len(asked), wrong


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the score."""
    parser = argparse.ArgumentParser(
        prog="python -m serve_app.demo.score",
        description="Print the share of right answers, and on standard error the wrong ones.",
    )
    parser.add_argument("answers", type=Path, help="the output of `saturate batch`, as .jsonl")
    parser.add_argument(
        "--questions", type=Path, default=QUESTIONS_FILE, help="id, prompt and answer (the demo's questions)"
    )
    options = parser.parse_args(arguments)
    try:
        right, total, wrong = score(options.answers, options.questions)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {error}")
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    print(f"accuracy {right / total:.1%}: {right} of {total} right")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)


if __name__ == "__main__":
    main()
