"""Documents and rows of the training text."""

import random

import pytest
import torch
from transformers import AutoTokenizer

from serve_app.demo.questions import Question, all_questions
from tests.training import corpus, train
from tests.training.tokenizer import END, TOKEN_ID


def test_training_chats_are_what_the_template_renders() -> None:
    question = Question(47, "+", 28)
    tokenizer = AutoTokenizer.from_pretrained(train.MODEL_FOLDER)
    messages = [
        {"role": "user", "content": question.prompt},
        {"role": "assistant", "content": question.answer},
    ]
    document = corpus.plain_document(question, chat=True)
    assert tokenizer.decode(document.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("chat", [False, True])
def test_only_the_answer_and_its_end_are_learnt(chat: bool) -> None:
    document = corpus.plain_document(Question(12, "-", 40), chat)
    assert [label for label in document.labels if label != corpus.IGNORED] == [*b"-28", TOKEN_ID[END]]


@pytest.mark.parametrize("length", [32, 512])
def test_rows_are_full_and_repeat_with_their_seed(length: int) -> None:
    questions = all_questions()
    tokens, labels = corpus.packed_rows(random.Random(7), questions, 5, length)
    assert tokens.shape == labels.shape == (5, length)
    learnt = labels != corpus.IGNORED
    assert torch.equal(tokens[learnt], labels[learnt])
    assert torch.equal(tokens, corpus.packed_rows(random.Random(7), questions, 5, length)[0])
