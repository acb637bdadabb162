"""Environment variables as a section of a config with a comment for each."""

from collections.abc import Sequence

from serve_app.models.document import Item, Section
from serve_app.settings.environment import Variable


def variable_section(variables: Sequence[Variable]) -> Section:
    """Return variables as a section."""
    return {variable.name: Item(variable.value, variable.reason) for variable in variables}
