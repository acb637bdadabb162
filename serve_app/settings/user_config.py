"""The `user_config` of an Engine's deployment: settings that change while the Engine runs."""

from pydantic import Field, ValidationError

from serve_app.api.protocol import JSON
from serve_app.settings.adapters import AdapterSettings
from serve_app.settings.fields import Positive, Strict, Weights
from serve_app.settings.models import GoalSettings
from serve_app.settings.schema import SettingsError, described


class BatcherUserConfig(Strict):
    """Admission to each replica; a field left out keeps the value from `args`."""

    capacity_tokens: Positive | None = Field(default=None, description="Tokens that may be in flight.")
    max_running: Positive | None = Field(default=None, description="Requests in flight.")
    max_queue_size: Positive | None = Field(default=None, description="Requests that wait.")
    goals: GoalSettings | None = Field(
        default=None, description="Latency goals; null: no goals, even where `args` has some."
    )
    tenant_weights: Weights | None = Field(
        default=None, description="Each tenant's share relative to other tenants; 1.0 where not given."
    )


class UserConfig(Strict):
    """The `user_config` as a whole. A change of the `user_config` alone restarts no replica."""

    batcher: BatcherUserConfig = Field(default=BatcherUserConfig(), description="Admission to each replica.")
    adapters: tuple[AdapterSettings, ...] | None = Field(
        default=None,
        description="LoRA adapters that replace the adapters in `args`; left out: the adapters in `args`.",
    )


def parse_user_config(user_config: JSON) -> UserConfig:
    """Check the `user_config` of an Engine.

    Raises:
        SettingsError: One line per error, with its path, the value and the expected form.
    """
    try:
        return UserConfig.model_validate(user_config)
    except ValidationError as error:
        raise SettingsError(described(error, UserConfig, "user_config")) from None
