"""Named points around every write, at which a test can end the process."""

from collections.abc import Callable

hook: Callable[[str], None] | None = None
"""Called with the name of each point that is reached; None outside tests."""


def reach(point: str) -> None:
    """Call the hook, if there is one."""
    if hook is not None:
        hook(point)
