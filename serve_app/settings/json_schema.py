"""The JSON Schema of a Serve config of this project, for completion and checks in editors."""

from copy import deepcopy
from typing import Any

from serve_app.api.protocol import JSON
from serve_app.settings.config_file import IMPORT_PATH
from serve_app.settings.schema import Settings
from serve_app.settings.user_config import UserConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"

ENGINE = "^Engine:"
"""Pattern of the names of deployments with a model."""


def config_schema() -> JSON:
    """Return the schema: Ray Serve's own, with the `args` and the `user_config` of this project."""
    # Importing Ray takes a second.
    from ray.serve.schema import ServeDeploySchema

    schema: JSON = deepcopy(ServeDeploySchema.model_json_schema())
    definitions = schema.setdefault("$defs", {})
    for model in (Settings, UserConfig):
        own = model.model_json_schema()
        definitions.update(own.pop("$defs", {}))
        definitions[model.__name__] = own
    # A simulated device needs no source.
    definitions["LLMSettings"]["required"].remove("source")
    application = definitions["ServeApplicationSchema"]
    application["allOf"] = [_if({"import_path": {"const": IMPORT_PATH}}, {"args": _reference(Settings)})]
    deployment = definitions["DeploymentSchema"]
    deployment["allOf"] = [_if({"name": {"pattern": ENGINE}}, {"user_config": _reference(UserConfig)})]
    return {"$schema": DIALECT, **schema, "title": "A Serve config with models of saturate"}


def _if(condition: JSON, consequence: JSON) -> JSON:
    return {
        "if": {"properties": condition, "required": list(condition)},
        "then": {"properties": consequence},
    }


def _reference(model: type[Any]) -> JSON:
    return {"$ref": f"#/$defs/{model.__name__}"}
