"""Schema of a Serve config's `args`. The `args` are checked before anything starts."""

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    model_validator,
)

from serve_app.api.validation import lines
from serve_app.settings.adapters import adapters_by_id
from serve_app.settings.batches import BatchesSettings
from serve_app.settings.fields import Group, Strict
from serve_app.settings.ingress import AccessSettings, IngressSettings
from serve_app.settings.models import LLMSettings, ModelSettings
from serve_app.settings.telemetry import TelemetrySettings
from serve_app.settings.turns import ShareSettings, check_memory
from serve_app.settings.usage import NO_USAGE, UsageSettings


class SettingsError(ValueError):
    """The settings are invalid; the message has each path and the expected form."""


class Settings(Strict):
    """The `args` as a whole."""

    models: Annotated[list[ModelSettings], Field(min_length=1)] = Field(description="The models to serve.")
    ingress: IngressSettings = Field(default=IngressSettings(), description="Limits of the HTTP side.")
    access: AccessSettings | None = Field(
        default=None, description="API keys; left out: requests need no key."
    )
    telemetry: TelemetrySettings = Field(
        default=TelemetrySettings(), description="Metrics, request log and traces."
    )
    batches: BatchesSettings | None = Field(
        default=None, description="Files and batches of OpenAI's API; left out: they aren't served."
    )
    usage: UsageSettings = Field(default=NO_USAGE, description="Accounting of the usage of keys and tenants.")
    share_groups: dict[Group, ShareSettings] = Field(
        default_factory=dict,
        description=(
            "Groups of models that take turns, by the name in `share`; other groups have the defaults."
        ),
    )

    @property
    def salts(self) -> bool:
        """Whether each tenant has its own part of the prefix caches. API keys tell the tenants apart."""
        return self.access is not None and not self.access.share_prefix_cache

    def sharing(self) -> dict[str, list[LLMSettings]]:
        """Return the models of each group that takes turns, by its name."""
        groups: dict[str, list[LLMSettings]] = {}
        for model in self.models:
            if isinstance(model, LLMSettings) and model.share is not None:
                groups.setdefault(model.share, []).append(model)
        return groups

    @model_validator(mode="after")
    def _groups_fit(self) -> "Settings":
        groups = self.sharing()
        for name in self.share_groups:
            if name not in groups:
                raise ValueError(f"share_groups.{name}: no model has share: {name}")
        for name, models in groups.items():
            share = self.share_groups.get(name, ShareSettings())
            least = (len(models) - 1) * share.min_turn_s
            if share.max_wait_s < least:
                raise ValueError(
                    f"share_groups.{name}.max_wait_s: with min_turn_s {share.min_turn_s:g} each of "
                    f"{len(models)} models may wait {least:g} s for the other models; raise max_wait_s to "
                    "that, or lower min_turn_s"
                )
            simulated = {model.simulate is not None for model in models}
            if len(simulated) > 1:
                raise ValueError(f"share: models of {name!r} are on simulated devices and on real ones")
            for model in models:
                check_memory(model, models)
        return self

    @model_validator(mode="after")
    def _ids_differ(self) -> "Settings":
        ids = [model.id for model in self.models]
        for model in self.models:
            if isinstance(model, LLMSettings):
                ids += adapters_by_id(model.id, model.adapters)
        if twice := sorted({i for i in ids if ids.count(i) > 1}):
            raise ValueError(f"models: the id {twice[0]!r} is used twice; each model needs its own")
        return self

    @model_validator(mode="after")
    def _quotas_have_a_place(self) -> "Settings":
        quotas = self.usage.quotas
        if quotas and not self.batches and not (quotas.folder or quotas.database or quotas.database_env):
            raise ValueError("usage.quotas: give folder, database or database_env for their state")
        return self


def parse(args: dict[str, Any]) -> Settings:
    """Check the `args` of a Serve config.

    Raises:
        SettingsError: One line per error, with its path, the value and the expected form.
    """
    try:
        return Settings.model_validate(args)
    except ValidationError as error:
        raise SettingsError(described(error, Settings, "args")) from None


def described(error: ValidationError, kind: type[BaseModel], part: str) -> str:
    """Return the errors about a part of a config: their number, and a line for each."""
    found = lines(error, kind, part)
    count = f"{len(found)} mistake{'s' if len(found) > 1 else ''}"
    verb = "have" if part.endswith("s") else "has"
    return f"the config's {part} {verb} {count}:\n  " + "\n  ".join(found)
