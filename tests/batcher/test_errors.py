"""Errors: they say what happened, cross process borders, and belong to one future each."""

import pickle

import pytest

from batcher import Aborted, BadResults, BatcherError, Closed, Expired, Oversize, QueueFull
from batcher.errors import described, separate


def test_each_is_also_what_python_calls_it() -> None:
    kinds = {
        Closed: RuntimeError,
        Expired: TimeoutError,
        Oversize: ValueError,
        Aborted: RuntimeError,
        BadResults: ValueError,
        QueueFull: Exception,
    }
    for kind, base in kinds.items():
        assert issubclass(kind, BatcherError)
        assert issubclass(kind, base)


@pytest.mark.parametrize(
    "error", [QueueFull("max_queue_size", 5, 1.5), Oversize(9, 5), Closed("x"), Expired("y")]
)
def test_they_survive_pickling(error: BatcherError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


class Picky(Exception):  # noqa: N818
    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint


class CodedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class WordyError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"error: {text}")


def raised(error: BaseException) -> BaseException:
    try:
        raise error from KeyError("cause")
    except BaseException as caught:
        return caught


def test_a_separate_error_is_equal_but_another_object() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    unicode_error = caught.value
    errors: list[BaseException] = [
        ValueError("a", 1),
        OSError(2, "no"),
        unicode_error,
        KeyError("k"),
        Oversize(2, 1),
        CodedError(5),
        ExceptionGroup("two", [ValueError(1), ValueError(2)]),
    ]
    for error in errors:
        original = raised(error)
        twin = separate(original)
        assert twin is not original
        assert type(twin) is type(original)
        assert str(twin) == str(original)
        assert repr(twin) == repr(original)
        assert twin.args == original.args
        assert vars(twin) == vars(original)
        assert twin.__cause__ is original.__cause__
        assert twin.__traceback__ is original.__traceback__
    assert separate(OSError(2, "no")).errno == 2  # type: ignore[union-attr]


def test_a_note_on_one_error_is_not_on_the_other() -> None:
    error = ValueError("x")
    error.add_note("of both")
    twin = separate(error)
    twin.add_note("of the twin")
    assert (error.__notes__, twin.__notes__) == (["of both"], ["of both", "of the twin"])


def test_an_error_that_can_not_be_copied_is_the_cause() -> None:
    # Its class wants other arguments than its `args`.
    error = Picky(5, hint="h")
    twin = separate(error)
    assert isinstance(twin, Aborted)
    assert (str(twin), twin.__cause__) == ("Picky: code 5", error)


def test_an_error_whose_copy_has_another_text_is_the_cause() -> None:
    error = WordyError("x")
    twin = separate(error)
    assert (type(twin), str(twin), twin.__cause__) == (Aborted, "WordyError: error: x", error)


class UnprintableError(Picky):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_an_error_that_can_be_neither_copied_nor_printed_is_named() -> None:
    error = UnprintableError(5, hint="h")
    assert str(separate(error)).startswith("UnprintableError: <")
    assert "UnprintableError object" in described(error)
