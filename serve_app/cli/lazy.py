"""A group of click commands that are imported when they are used."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that imports none of its commands to list, complete or explain them.

    Args:
        places: By name, the place of each command (`module:attribute`) and its line in the help text.
        attributes: Those of `click.Group`.
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
    """Stands for a command until it is called.

    Args:
        name: Its name.
        place: Where it is: `module:attribute`.
        help: Its line in the help text of the group.
    """

    def __init__(self, name: str, place: str, help: str) -> None:
        super().__init__(name, short_help=help)
        self._place = place

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Import the command; the context is one of its own."""
        module, _, attribute = self._place.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command.make_context(info_name, args, parent, **extra)
