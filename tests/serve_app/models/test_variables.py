"""Environment variables in a config: Ray Serve reads their exact text."""

from collections.abc import Sequence

import pytest
import yaml

from serve_app.models.document import Item, render
from serve_app.models.variables import variable_section
from serve_app.settings.environment import Variable, controller_variables, replica_variables


def written(*variables: Variable) -> str:
    """Return the YAML of variables."""
    return render({"env_vars": Item(variable_section(variables))})


@pytest.mark.parametrize(
    "variables",
    [
        controller_variables(long_answers=True),
        replica_variables(long_answers=True, one_machine=True, cpu=True, offline=True),
        (),
    ],
    ids=["controller", "replicas", "none"],
)
def test_the_variables_of_a_config_keep_their_order_and_their_values(variables: Sequence[Variable]) -> None:
    # A value may have several lines: HAProxy's options come in some.
    read = yaml.safe_load(written(*variables))["env_vars"]
    assert list(read.items()) == [(variable.name, variable.value) for variable in variables]


@pytest.mark.parametrize(
    "value", ["", " ", "1", "007", "1e3", "yes", "null", "~", "a: b", "# x", "'\"\\", "a\n  b\t", "é 模型"]
)
def test_a_value_stays_text_whatever_yaml_would_take_it_for(value: str) -> None:
    assert yaml.safe_load(written(Variable("A", value))) == {"env_vars": {"A": value}}


def test_a_reason_is_the_comment_and_the_next_variable_without_one_shares_it() -> None:
    assert (
        written(Variable("A", "1", "Both."), Variable("B", "x"), Variable("C", "y", "This one."))
        == """\
env_vars:
  # Both.
  A: "1"
  B: x
  # This one.
  C: y
"""
    )
