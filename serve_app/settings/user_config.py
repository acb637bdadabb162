"""What a config may change in Engines that run: the `user_config` of their deployment."""

from pydantic import BaseModel, ValidationError

from serve_app.api.protocol import JSON
from serve_app.settings.messages import explain
from serve_app.settings.schema import Positive, SettingsError, Strict, Weights


class BatcherUserConfig(Strict):
    """Admission to each replica; a field left out is as `args` have it.

    Attributes:
        capacity_tokens: Tokens that may be in flight.
        max_running: Requests in flight.
        tenant_weights: Share of a tenant in relation to the others; 1.0 where not given.
    """

    capacity_tokens: Positive | None = None
    max_running: Positive | None = None
    tenant_weights: Weights | None = None


class UserConfig(Strict):
    """All that `user_config` may hold. A change of it alone restarts nothing.

    Attributes:
        batcher: Admission to each replica.
    """

    batcher: BatcherUserConfig = BatcherUserConfig()


def parse_user_config(user_config: JSON) -> UserConfig:
    """Check the `user_config` of an Engine.

    Raises:
        SettingsError: One line per mistake, with its path, the value and what is allowed.
    """
    try:
        return UserConfig.model_validate(user_config)
    except ValidationError as error:
        raise SettingsError(explain(error, _SECTIONS, "user_config")) from None


_SECTIONS: dict[tuple[str, ...], type[BaseModel]] = {(): UserConfig, ("batcher",): BatcherUserConfig}
