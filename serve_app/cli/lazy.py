"""A group of click commands that are imported on use."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that lists, completes and explains its commands without importing them.

    Args:
        places: By name, the place of each command (`module:attribute`) and its line in the help text.
        attributes: Arguments of `click.Group`.
    """

    def __init__(self, *, places: Mapping[str, tuple[str, str]], **attributes: Any) -> None:
        commands: dict[str, click.Command] = {
            name: LazyCommand(name, *place) for name, place in places.items()
        }
        super().__init__(commands=commands, **attributes)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of `places`."""
        return list(self.commands)


class LazyCommand(click.Command):
    """A placeholder for a command until it is called.

    Args:
        name: Name of the command.
        place: Place of the command, as `module:attribute`.
        help: Line in the help text of the group.
    """

    def __init__(self, name: str, place: str, help: str) -> None:
        super().__init__(name, short_help=help)
        self._place = place

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Import the command and return its context."""
        module, _, attribute = self._place.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command.make_context(info_name, args, parent, **extra)
