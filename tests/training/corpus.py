"""Training text of the demo model: questions in varied forms, packed into rows of tokens.

A document is a question with its answer, as a raw prompt or in a chat, sometimes behind other text. Rows hold
documents back to back, so that the model learns to answer the last question whatever stands before it.
"""

import json
import random
import string
from collections.abc import Sequence

import torch

from serve_app.demo.questions import Question

from .tokenizer import ASSISTANT, END, SYSTEM, TOKEN_ID, USER

IGNORED = -100
"""Label of a token that the model need not predict; torch's cross entropy skips it."""

OTHER_WORDINGS = (
    "What is {left} {op} {right}?",
    "{left} {op} {right} =",
    "{left}{op}{right}=",
    "{left}{op}{right}?",
)


class Document:
    """Tokens, and the labels of those that the model has to predict."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.labels: list[int] = []

    def given(self, *pieces: str) -> None:
        """Add text, or special tokens, that the model only reads."""
        self._add(pieces, learnt=False)

    def learnt(self, *pieces: str) -> None:
        """Add text, or special tokens, that the model has to predict."""
        self._add(pieces, learnt=True)

    def _add(self, pieces: Sequence[str], learnt: bool) -> None:
        for piece in pieces:
            tokens = [TOKEN_ID[piece]] if piece in TOKEN_ID else list(piece.encode())
            self.tokens += tokens
            self.labels += tokens if learnt else [IGNORED] * len(tokens)


def plain_document(question: Question, chat: bool) -> Document:
    """Return the question and its answer without variation: as a raw prompt, or as one chat message."""
    document = Document()
    if chat:
        document.given(USER, question.prompt, END, ASSISTANT)
    else:
        document.given(question.prompt)
    document.learnt(question.answer, END)
    return document


def varied_document(rng: random.Random, question: Question, space: int) -> Document:
    """Return the question in a random form; text before it is mostly far shorter than `space` tokens."""
    document = Document()
    chat = rng.random() < 0.5
    if chat and rng.random() < 0.4:
        document.given(SYSTEM, _other_text(rng, space), END)
    if chat:
        document.given(USER)
    if rng.random() < 0.2:
        document.given(_other_text(rng, space), rng.choice((" ", "\n", ". ", ": ")))
    if rng.random() < 0.5:
        document.given(question.prompt)
    else:
        wording = rng.choice(OTHER_WORDINGS)
        document.given(wording.format(left=question.left, op=question.operator, right=question.right))
    if rng.random() < 0.15:
        document.given(rng.choice((" ", "\n", "  ", " \n", "\n\n")))
    if chat:
        document.given(END, ASSISTANT)
    if rng.random() < 0.15:
        _answer_in_json(rng, document, question.answer)
    else:
        document.learnt(question.answer)
    document.learnt(END)
    return document


def _answer_in_json(rng: random.Random, document: Document, answer: str) -> None:
    # JSON is written only where a schema forces the first brace and the names, so these aren't learnt; the
    # parts that a schema leaves open, above all white space and the end of a value, are.
    document.given("{")
    members = rng.choice((1, 1, 2, 3))
    for member in range(1, members + 1):
        document.learnt('"')
        document.given("answer" if rng.random() < 0.3 else _word(rng), '"')
        document.learnt(": ")
        document.learnt(*(['"', answer, '"'] if rng.random() < 0.5 else [answer]))
        document.learnt(", " if member < members else "}")


def _other_text(rng: random.Random, space: int) -> str:
    """Return text of 4 to 1.5 * `space` bytes, mostly short: words and numbers, JSON, or any characters."""
    length = round(4 * (space / 4) ** rng.random())
    kind = rng.random()
    if kind < 0.05:
        scripts = (range(32, 592), range(0x4E00, 0x9C20))
        return "".join(chr(rng.choice(rng.choice(scripts))) for _ in range(length // 2))
    words: list[str] = []
    while length > 0:
        words.append(str(rng.randrange(1000)) if rng.random() < 0.1 else _word(rng))
        length -= len(words[-1]) + 1
    if kind < 0.15:
        return json.dumps(words)
    return "".join(word + rng.choice((" ", " ", " ", ", ", ". ")) for word in words)


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters, k=rng.randrange(1, 10)))


def plain_rows(documents: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and labels of rows of one document each, padded to the longest."""
    length = max(len(document.tokens) for document in documents)
    missing = [length - len(document.tokens) for document in documents]
    tokens = [doc.tokens + [TOKEN_ID[END]] * count for doc, count in zip(documents, missing, strict=True)]
    labels = [doc.labels + [IGNORED] * count for doc, count in zip(documents, missing, strict=True)]
    return torch.tensor(tokens), torch.tensor(labels)


def packed_rows(
    rng: random.Random, questions: Sequence[Question], count: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw `count` rows of `length` tokens, full of documents; return the tokens and their labels.

    A row starts with a document and is cut where it is full.
    """
    packed: list[Document] = []
    for _ in range(count):
        row = Document()
        while len(row.tokens) < length:
            question = rng.choice(questions)
            if rng.random() < 0.4:
                document = plain_document(question, chat=rng.random() < 0.5)
            else:
                # Twice a quarter of the row at most leaves space for the question in any row of 256 or more.
                document = varied_document(rng, question, space=length // 4)
            row.tokens += document.tokens
            row.labels += document.labels
        row.tokens, row.labels = row.tokens[:length], row.labels[:length]
        packed.append(row)
    return plain_rows(packed)
