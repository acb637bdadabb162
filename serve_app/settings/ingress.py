"""Settings of the Ingress: limits of requests, and access by keys."""

import re
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    model_validator,
)

from serve_app.api.protocol import Flag
from serve_app.settings.addresses import Network
from serve_app.settings.fields import File, Positive, Seconds, Strict


def _origin(url: str) -> str:
    if url != "*" and not re.fullmatch(r"https?://[^/\s]+", url):
        raise ValueError(f"must be '*' or an origin such as https://chat.example.com, not {url!r}")
    return url


class IngressSettings(Strict):
    """Limits of the HTTP side."""

    max_body_bytes: Positive = Field(
        default=32 * 1024 * 1024, description="Largest request body, in bytes; a larger body gets a 413."
    )
    max_bytes_in_flight: Positive | None = Field(
        default=None,
        description=(
            "Maximum bytes of all request bodies that one Ingress replica holds, from arrival to the end "
            "of their answers; a further request gets a 503. The first half of these bytes also keeps "
            "streams that could go on in another Engine. By default eight times `max_body_bytes`."
        ),
    )
    body_timeout_s: Seconds = Field(
        default=60.0,
        description="Seconds within which a request body must arrive; a slower body gets a 408.",
    )
    max_prompts: Positive = Field(
        default=10_000, description="Maximum prompts in one call, and records in one `/process` call."
    )
    max_tokens: Positive | None = Field(
        default=None,
        description=(
            "Maximum tokens per answer that a request may ask for; the default bound is the model's context."
        ),
    )
    max_n: Positive = Field(default=128, description="Maximum answers per prompt (`n`).")
    max_messages: Positive = Field(
        default=10_000,
        description="Maximum messages and parts of their contents, in all chats of a call; and most tools.",
    )
    max_values: Positive = Field(
        default=100_000,
        description=(
            "Maximum values in a JSON body: texts, numbers, objects, lists. Prompts in tokens may have 10 "
            "times as many numbers; all fields beside the prompt may have a tenth of the values."
        ),
    )
    open_adapters: Flag = Field(
        default=False, description="Let clients load and unload adapters while the service requires no keys."
    )
    allow_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = Field(
        default=(),
        description='Origins of web pages that may call the service (CORS), or "*"; by default none.',
    )

    @property
    def bytes_in_flight(self) -> int:
        """`max_bytes_in_flight` in effect."""
        return self.max_bytes_in_flight or 8 * self.max_body_bytes

    @model_validator(mode="after")
    def _one_body_fits(self) -> "IngressSettings":
        if self.bytes_in_flight < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_bytes_in_flight: must be at least twice max_body_bytes, which is {self.max_body_bytes}"
            )
        return self


class AccessSettings(Strict):
    """Sources of API keys; `serve_app.auth.keys.Key` has the fields of a key."""

    keys_file: File | None = Field(
        default=None, description="A YAML or JSON list of keys. It is read again when it changes."
    )
    keys_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        default=None, description="Environment variable with such a list; it is read once."
    )
    trusted_proxies: tuple[Network, ...] = Field(
        default=(),
        description=(
            "Address ranges of the proxies whose `X-Forwarded-For` gives a client's address, for keys with "
            "`allow_from`. By default the peer of the connection is the client."
        ),
    )
    share_prefix_cache: bool = Field(
        default=False,
        description=(
            "Whether all tenants share the engines' prefix caches. Then cached tokens and times tell a "
            "tenant how prompts of other tenants begin. By default each tenant finds its own prompts only."
        ),
    )

    @model_validator(mode="after")
    def _has_a_source(self) -> "AccessSettings":
        if self.keys_file is None and self.keys_env is None:
            raise ValueError("give keys_file or keys_env; to serve without API keys, leave access out")
        return self
