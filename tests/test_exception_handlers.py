"""Each handler of all exceptions re-raises, logs the stack, or says in a comment why neither is needed."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parent.parent
BROAD = {"Exception", "BaseException"}


def is_broad(kind: ast.expr | None) -> bool:
    """Return whether a type catches all exceptions; None is that of a bare `except`."""
    if kind is None:
        return True
    return bool(BROAD & {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)})


def re_raises(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler ends with the exception itself, or with one that it is the cause of."""
    last = handler.body[-1]
    if not isinstance(last, ast.Raise):
        return False
    names = {last.exc.id} if isinstance(last.exc, ast.Name) else set()
    if isinstance(last.cause, ast.Name):
        names.add(last.cause.id)
    return last.exc is None or handler.name in names


def logs_the_stack(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler logs with the stack."""
    calls = [node for part in handler.body for node in ast.walk(part) if isinstance(node, ast.Call)]
    return any(
        (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "exception"
            and _is_logger(call.func.value)
        )
        or any(word.arg == "exc_info" for word in call.keywords)
        for call in calls
    )


def _is_logger(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "logger"


def comments(text: str) -> set[int]:
    """Return the lines with a comment that says something; one for a linter says nothing."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = (token for token in tokens if token.type == tokenize.COMMENT)
    return {token.start[0] for token in found if not token.string.startswith(("# noqa", "# type:"))}


def suppresses_all(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether a node is a call of `contextlib.suppress` for all exceptions."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "suppress":
        return False
    return any(map(is_broad, node.args))


def unexplained(text: str) -> Iterator[int]:
    """Yield the lines of handlers of all exceptions that do none of the three."""
    said = comments(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type):
            explained = said & {node.lineno, node.lineno + 1}
            if not (explained or re_raises(node) or logs_the_stack(node)):
                yield node.lineno
        elif suppresses_all(node) and not said & {node.lineno - 1, node.lineno, node.lineno + 1}:
            yield node.lineno


PRODUCT = sorted(path for folder in ("serve_app", "batcher") for path in (ROOT / folder).rglob("*.py"))


def test_each_handler_of_all_exceptions_raises_logs_the_stack_or_says_why_not() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in PRODUCT for line in unexplained(path.read_text())]
    assert found == [], "raise, log with logger.exception or exc_info, or say why neither, below the `except`"


@pytest.mark.parametrize(
    ("handler", "fine"),
    [
        ("except Exception:\n    pass", False),
        ("except BaseException as error:\n    log(error)", False),
        ("except (OSError, Exception):\n    pass", False),
        ("except:\n    pass", False),
        ("except Exception as error:\n    raise ValueError from None", False),
        ("except Exception as error:\n    if error:\n        raise", False),
        ("except Exception as error:\n    logger.warning('%r', error)", False),
        ("except Exception as error:\n    task.exception()", False),
        ("except Exception:  # noqa: BLE001\n    pass", False),
        ("except Exception:\n    pass\n# A comment on what follows.", False),
        ("except Exception:\n    raise", True),
        ("except Exception as error:\n    raise ValueError from error", True),
        ("except Exception as error:\n    close()\n    raise error", True),
        ("except Exception:\n    logger.exception('x')", True),
        ("except Exception as error:\n    logger.error('x', exc_info=error)", True),
        ("except Exception:\n    # The caller is told.\n    pass", True),
        ("except Exception:  # The caller is told.\n    pass", True),
        ("except OSError:\n    pass", True),
    ],
)
def test_the_walk_finds_what_it_should(handler: str, fine: bool) -> None:
    assert (not list(unexplained(f"try:\n    pass\n{handler}\n"))) is fine


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("with suppress(Exception):\n    x()", False),
        ("with contextlib.suppress(OSError, BaseException):\n    x()", False),
        ("with suppress(OSError):\n    x()", True),
        ("# It is gone already.\nwith suppress(Exception):\n    x()", True),
    ],
)
def test_the_walk_finds_what_is_suppressed(text: str, fine: bool) -> None:
    assert (not list(unexplained(text))) is fine
