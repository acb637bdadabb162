"""Each handler of all exceptions re-raises, logs the stack, or says in a comment why neither is needed."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

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


def test_a_handler_of_all_exceptions_raises_logs_or_says_why_not() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in PRODUCT for line in unexplained(path.read_text())]
    assert found == [], "raise, log with logger.exception or exc_info, or say why neither, below the `except`"


MIXED = """
try: x()
except Exception: pass
except (OSError, BaseException) as error: logger.warning("%r", error)
except Exception as error: raise ValueError from None
except: pass  # noqa: E722

with contextlib.suppress(OSError, Exception): x()
try: x()
except OSError: pass
except Exception as error: raise ValueError from error
except Exception: logger.exception("x")
except Exception:
    # The caller gets an error.
    pass
# It is gone already.
with suppress(Exception): x()
"""


def test_the_walk_finds_handlers_that_say_nothing() -> None:
    assert sorted(unexplained(MIXED)) == [3, 4, 5, 6, 8]
