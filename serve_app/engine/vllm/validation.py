"""Validation of vLLM's requests that ends at the first wrong item of a list.

The imports are those of vLLM 0.32.
"""

from typing import Any, get_args

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic_core import SchemaValidator

LISTS = {"list", "tuple", "set", "frozenset", "dict"}
"""Kinds of pydantic's schemas that hold any number of items."""

OPAQUE = {"metadata", "serialization"}
"""Parts of a schema that have no say in validation."""


def end_at_first_error(app: FastAPI) -> None:
    """Make the routes of vLLM's application give a list up at its first wrong item.

    pydantic looks at all items, and keeps an error for each alternative that an item is not: for 10,000 empty
    objects in the `input` of `/v1/responses`, a body of 30 kB, it takes 40 s and 10 GiB on the event loop.

    Args:
        app: The application.

    Raises:
        RuntimeError: This version of FastAPI keeps its validators elsewhere.
    """
    found = False
    for route in app.router.routes:
        for field in getattr(getattr(route, "dependant", None), "body_params", ()):
            adapter = field._type_adapter
            adapter.core_schema, adapter.validator = _bounded(adapter.core_schema)
            for model in _models(field.field_info.annotation):
                # vLLM and this package make some requests of such a class by themselves.
                model.__pydantic_core_schema__, model.__pydantic_validator__ = _bounded(
                    model.__pydantic_core_schema__
                )
            found = True
    if not found:
        raise RuntimeError("no route of vLLM's application has a body: its lists would not be bounded")


def _bounded(schema: Any) -> tuple[Any, SchemaValidator]:
    schema = _failing_fast(schema)
    # The validators of the classes inside look at all items.
    return schema, SchemaValidator(schema, _use_prebuilt=False)


def _failing_fast(schema: Any) -> Any:
    """Return a copy of a schema whose lists fail at their first wrong item."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_failing_fast, schema)) if type(schema) in (list, tuple) else schema
    if not isinstance(schema, dict):
        return schema
    # The names of fields and definitions are keys too, "type" among them.
    kind = schema.get("type")
    is_schema = isinstance(kind, str)
    copy = {
        name: value if is_schema and name in OPAQUE else _failing_fast(value)
        for name, value in schema.items()
    }
    if is_schema and kind in LISTS:
        copy["fail_fast"] = True
    return copy


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that an annotation names: itself, or its alternatives."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]
