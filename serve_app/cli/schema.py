"""The command `saturate schema`."""

import json

import click

from serve_app.settings.json_schema import config_schema


@click.command()
def schema() -> None:
    """Print the JSON Schema of configs, for editors and other checkers.

    The schema extends Ray Serve's schema of a config with the types, defaults and descriptions of all
    settings of this project. `saturate serve CONFIG --print-config` checks the rules between settings.

    \b
    Example, for editors with the YAML language server: the first line of the config names the schema.
      saturate schema > schema.json
      # yaml-language-server: $schema=schema.json
    """
    print(json.dumps(config_schema(), indent=1, ensure_ascii=False))
