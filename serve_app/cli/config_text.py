"""Add missing variables to the text of a config; its own lines and comments stay."""

from serve_app.settings.completion import complete_config, missing_variables
from serve_app.system.yaml_text import Place, load, updated_or_new

ENVIRONMENT = ("runtime_env", "env_vars")
"""Place of the variables in `controller_options` and in an application."""


def completed(text: str) -> str:
    """Return a config with its missing variables added, each with a comment.

    If the text can't be changed in place, the config is written anew, without comments.

    Args:
        text: A valid Serve config, as YAML.

    Raises:
        NotYAMLError: The text is not YAML.
    """
    content = load(text)
    missing = missing_variables(content)
    places: dict[Place, str] = {
        ("controller_options", *ENVIRONMENT, variable.name): variable.reason
        for variable in missing.controller
    }
    for index, variables in missing.applications.items():
        for variable in variables:
            places["applications", index, *ENVIRONMENT, variable.name] = variable.reason
    return updated_or_new(text, complete_config(content), places)
