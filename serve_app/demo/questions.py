"""The questions of the demo model: every sum and difference of two numbers from 0 to 99.

``python -m serve_app.demo.questions`` writes `questions.jsonl` anew: 500 of them, the same each time.
"""

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

QUESTIONS_FILE = Path(__file__).parent / "questions.jsonl"


@dataclass(frozen=True)
class Question:
    """One question: two numbers from 0 to 99 and the operator between them, ``+`` or ``-``."""

    left: int
    operator: str
    right: int

    @property
    def prompt(self) -> str:
        """The question as a prompt: ``What is 47+28?``."""
        return f"What is {self.left}{self.operator}{self.right}?"

    @property
    def answer(self) -> str:
        """The right answer in decimal digits: ``75``, or ``-28`` below zero."""
        return str(self.left + self.right if self.operator == "+" else self.left - self.right)


def all_questions() -> list[Question]:
    """Return all 20,000 questions, always in the same order."""
    numbers = range(100)
    return [Question(left, operator, right) for operator in "+-" for left in numbers for right in numbers]


def split_questions(held_out: float, seed: int) -> tuple[list[Question], list[Question]]:
    """Split all questions into a training set and a held-out set; `held_out` is its share, 0 to 1.

    A question and its mirror image fall on the same side: a model that was trained on 28+47 knows 47+28.
    """
    mirrored = [(operator, low, high) for operator in "+-" for high in range(100) for low in range(high + 1)]
    aside = set(random.Random(seed).sample(mirrored, round(held_out * len(mirrored))))
    learn: list[Question] = []
    keep: list[Question] = []
    for question in all_questions():
        low, high = sorted((question.left, question.right))
        (keep if (question.operator, low, high) in aside else learn).append(question)
    return learn, keep


def sample_questions(count: int = 500, seed: int = 0) -> list[Question]:
    """Draw `count` different questions; the same seed draws the same questions."""
    return random.Random(seed).sample(all_questions(), count)


def to_jsonl(questions: Iterable[Question]) -> str:
    """Return questions as JSON lines with ``id``, ``prompt`` and the expected ``answer``."""
    return "".join(
        json.dumps({"id": f"q{number:03}", "prompt": question.prompt, "answer": question.answer}) + "\n"
        for number, question in enumerate(questions)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the question file."""
    parser = argparse.ArgumentParser(
        prog="python -m serve_app.demo.questions",
        description="Write the demo's question file: one JSON object a line with id, prompt and answer. "
        "The defaults give exactly the file in the repository.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=QUESTIONS_FILE, help="the file to write")
    parser.add_argument("--count", type=int, default=500, help="how many questions, 20000 at most")
    parser.add_argument("--seed", type=int, default=0, help="chooses which questions")
    options = parser.parse_args(arguments)
    options.out.write_text(to_jsonl(sample_questions(options.count, options.seed)), encoding="utf-8")
    print(f"{options.count} questions in {options.out}")


if __name__ == "__main__":
    main()
