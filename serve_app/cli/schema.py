"""The command `saturate schema`."""

import json

import click

from serve_app.settings.json_schema import config_schema


@click.command()
def schema() -> None:
    """Print the JSON Schema of configs, for editors and other checkers.

    It is Ray Serve's own schema of a config, with all settings of this project: their types, defaults and
    descriptions. The rules between settings are checked by `saturate serve CONFIG --print-config`.

    \b
    Example, for editors with the YAML language server: the first line of the config names the file.
      saturate schema > schema.json
      # yaml-language-server: $schema=schema.json
    """
    print(json.dumps(config_schema(), indent=1, ensure_ascii=False))
