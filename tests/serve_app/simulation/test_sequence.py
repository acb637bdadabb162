"""The tokens of a simulated sequence."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.simulation.sequence import TokenSequence

LETTERS = range(97, 123)
PROMPTS = st.lists(st.integers(0, 2**32 - 1), max_size=50)


def run(tokens: TokenSequence, count: int) -> list[int]:
    return [tokens.next(LETTERS) for _ in range(count)]


@given(PROMPTS)
def test_a_prompt_has_one_answer(prompt: list[int]) -> None:
    answer = run(TokenSequence(prompt), 20)
    assert run(TokenSequence(prompt), 20) == answer
    assert set(answer) <= set(LETTERS)


@given(PROMPTS, st.integers(0, 20))
def test_an_answer_goes_on_the_same_with_its_first_tokens_in_the_prompt(prompt: list[int], sent: int) -> None:
    answer = run(TokenSequence(prompt), 20)
    assert run(TokenSequence(prompt + answer[:sent]), 20 - sent) == answer[sent:]
    assert run(TokenSequence(prompt, answer[:sent]), 20 - sent) == answer[sent:]


@given(PROMPTS, st.integers(0, 20))
def test_forgotten_tokens_come_again(prompt: list[int], kept: int) -> None:
    tokens = TokenSequence(prompt)
    answer = run(tokens, 20)
    tokens.keep(kept)
    assert len(tokens) == len(prompt) + kept
    assert run(tokens, 20 - kept) == answer[kept:]


def test_answers_differ_and_use_all_choices() -> None:
    answers = {tuple(run(TokenSequence([number]), 20)) for number in range(100)}
    assert len(answers) == 100
    assert set(run(TokenSequence([1]), 2_000)) == set(LETTERS)


def test_the_choices_are_kept() -> None:
    assert TokenSequence([1, 2]).next([5]) == 5
