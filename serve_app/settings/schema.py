"""Schema of a Serve config's `args`. It is checked before anything starts."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from batcher import PROFILES, DynamicBatcher, profile
from batcher.forming import Forming
from serve_app.api.addresses import Network
from serve_app.api.protocol import Flag, SamplingFields
from serve_app.api.scheduling import Tenant
from serve_app.settings.messages import describe_errors
from serve_app.simulation.profiles import Profile, read_profile

DEMO_MODEL = "saturate://demo"
"""The `source` of the model that is shipped with this package."""

DEMO_FOLDER = Path(__file__).parents[1] / "demo"

Positive = Annotated[int, Field(strict=True, ge=1)]
NotNegative = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Weights = dict[str, Weight]
ModelId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]

ServedId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]
"""The id of a model or of an adapter."""

Group = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name of a group of models that take turns."""

Host = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
"""The name of a host, in lower case, without scheme and port."""


def _folder(path: str) -> str:
    if not Path(path).expanduser().is_absolute():
        raise ValueError(f"must be an absolute path, or one that begins with ~/, not {path!r}")
    return path


def _content(url: str) -> str:
    if "://" in url:
        return url
    return _folder(url)


class SettingsError(ValueError):
    """Settings are wrong; the message names each path and what is allowed."""


class Strict(BaseModel):
    """A section that refuses unknown keys, so that a typo isn't taken for a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineSettings(Strict):
    """vLLM's own settings, named as in `vllm serve --help`, with underscores.

    A setting left out keeps vLLM's default. `extra` takes any other `vllm serve` option; vLLM
    checks its value when the engine starts.
    """

    tokenizer: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = None
    quantization: str | None = None
    load_format: str | None = None
    trust_remote_code: Flag | None = None
    seed: Annotated[int, Field(strict=True)] | None = None
    max_model_len: Positive | None = None
    gpu_memory_utilization: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    kv_cache_memory_bytes: Positive | None = None
    tensor_parallel_size: Positive | None = None
    pipeline_parallel_size: Positive | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    enable_chunked_prefill: Flag | None = None
    long_prefill_token_threshold: NotNegative | None = None
    scheduling_policy: Literal["fcfs", "priority"] | None = None
    enable_prefix_caching: Flag | None = None
    enforce_eager: Flag | None = None
    distributed_executor_backend: str | None = None
    chat_template: str | None = None
    enable_auto_tool_choice: Flag | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_lora: Flag | None = None
    max_loras: Positive | None = None
    max_cpu_loras: Positive | None = None
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] | None = None
    allowed_media_domains: list[Host] | None = None
    extra: dict[str, Any] = {}

    def options(self) -> dict[str, Any]:
        """Return the options that are set, by their vLLM names."""
        return self.model_dump(exclude={"extra"}, exclude_none=True) | self.extra

    @model_validator(mode="after")
    def _extra_holds_only_the_rest(self) -> "EngineSettings":
        for name in self.extra:
            if name in type(self).model_fields:
                raise ValueError(f"extra.{name}: put {name} directly under engine, where it is checked")
            if name in {"model", "served_model_name", "host", "port", "uds", "api_key"}:
                raise ValueError(f"extra.{name}: saturate sets this itself; leave it out")
        return self


class GoalSettings(Strict):
    """Latency goals for 99 of 100 requests of the tiers above `flex`; see `batcher.Goals`.

    Attributes:
        ttft_p99_s: Seconds from arrival at the replica to the first token.
        tpot_p99_s: Seconds per token after the first.
    """

    ttft_p99_s: Seconds
    tpot_p99_s: Seconds | None = None


class BatcherSettings(Strict):
    """Admission of requests to one Engine replica.

    Attributes:
        policy: `guaranteed_no_evict` reserves prompt + max_tokens of KV cache for each request, so
            a running request is never preempted. `max_utilization` reserves the prompt and an
            output estimated from finished requests: more run at once, some may be preempted.
        capacity_tokens: Tokens that may be in flight; by default the KV capacity that vLLM reports.
        max_running: Most requests in flight. The default, and the upper bound, is vLLM's `max_num_seqs`
            plus as many as end within two steps: these wait in vLLM, so that no step runs with a free
            sequence slot.
        max_queue_size: Most requests that wait; the next one is answered 429.
        max_queue_tokens: Most tokens that wait; by default only `max_queue_size` bounds the queue.
        tenant_weights: Each tenant's share relative to the others; 1.0 where not given.
        goals: Latency goals for the tiers above `flex`; `flex` runs beside them as far as the goals
            allow. vLLM schedules by tier too, unless `engine.scheduling_policy` says otherwise. Without
            goals a tier goes before the next lower one, and nothing more.
        priority_aging_s: Seconds of waiting after which a tier goes before the next higher one, for one
            request; null: never. The default is 10, with goals null.
    """

    policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    capacity_tokens: Positive | None = None
    max_running: Positive | None = None
    max_queue_size: Positive = 5_000
    max_queue_tokens: Positive | None = None
    tenant_weights: Weights = {}
    goals: GoalSettings | None = None
    priority_aging_s: Seconds | None = 10.0

    @property
    def aging_s(self) -> float | None:
        """`priority_aging_s` in effect: null with goals, since ageing works against them, unless set."""
        left_out = "priority_aging_s" not in self.model_fields_set
        return None if self.goals and left_out else self.priority_aging_s


def _adapter_source(source: str) -> str:
    if "://" in source or source.startswith(("/", "~/")) or re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        return source
    raise ValueError(
        f"must be an absolute path, a Hugging Face id such as org/name, or a URL such as s3://BUCKET/PATH, "
        f"not {source!r}"
    )


class AdapterSettings(Strict):
    """A LoRA adapter of a language model, in PEFT's file format.

    Attributes:
        source: A directory, a Hugging Face id, a URL such as `s3://BUCKET/PATH`, or `saturate://demo/NAME`.
        id: The name that clients put in `model`; by default `MODEL:NAME`, with the last part of `source`.
        pinned: It keeps its slot in the engine, whatever else is asked for.
    """

    source: Annotated[str, AfterValidator(_adapter_source)]
    id: ServedId | None = None
    pinned: Flag = False

    @property
    def name(self) -> str:
        """The last part of the source: what clients may see of it."""
        return self.source.rstrip("/").rpartition("/")[2]

    @property
    def root(self) -> str:
        """The source as clients see it: without the directories or the bucket that it is in."""
        private = "://" in self.source or self.source.startswith(("/", "~"))
        return self.name if private else self.source

    @property
    def location(self) -> str:
        """The directory, Hugging Face id or URL that the files are read from."""
        if self.source.startswith(f"{DEMO_MODEL}/"):
            return str(DEMO_FOLDER / "adapters" / self.name)
        return str(Path(self.source).expanduser()) if self.source.startswith("~/") else self.source


def adapters_by_id(model: str, adapters: Sequence[AdapterSettings]) -> dict[str, AdapterSettings]:
    """Return adapters by their ids.

    Args:
        model: Id of their base model.
        adapters: The adapters.

    Raises:
        ValueError: Two have the same id.
    """
    found: dict[str, AdapterSettings] = {}
    for number, adapter in enumerate(adapters):
        id = adapter.id or f"{model}:{adapter.name}"
        if id in found:
            raise ValueError(f"adapters[{number}].id: {id!r} is used twice; each adapter needs its own")
        found[id] = adapter
    return found


MAX_SLOTS = 8
"""Adapters in one batch of an engine, at most, unless `max_loras` says otherwise."""

LATER_SLOTS = 4
"""The least of it where adapters may come while the service runs."""

MAX_CPU_SLOTS = 64


class LLMSettings(Strict):
    """A language model in vLLM, served by one Engine deployment, `Engine:<id>`.

    Attributes:
        id: The name that clients put in `model`.
        kind: "llm"; may be left out.
        source: A Hugging Face model id, a directory, or `saturate://demo`.
        engine: vLLM's settings.
        batcher: Admission to each replica.
        sampling: Defaults for `/generate` where a request leaves a field out.
        engine_hang_timeout_s: Seconds without a step after which the replica of an engine with work is
            replaced. It has to exceed the longest step, a kernel's first compilation included. With
            `disable_log_stats` only a step that yields a token is seen: then it has to exceed the longest
            prompt's time to first token.
        grammar_cpu_s: Seconds of CPU that a JSON schema, a regular expression or another grammar of a request
            may take to parse; one that takes longer is answered 400.
        grammar_compile_cpu_s: The same to compile one, for the tokens of the model.
        max_tokenize_tokens: Most tokens of a text of `/tokenize`, and of a list of `/detokenize`; null: as
            many as the context. Other routes take what fits into the context.
        max_prompt_logprobs: Most logprobs of a prompt (`prompt_logprobs`, `echo` with `logprobs`): its tokens
            times the logprobs of each. vLLM makes them on the event loop.
        simulate: Profile of a simulated device, which takes the model's place: a built-in one by its name, a
            YAML file by its absolute path, or the fields of a `serve_app.simulation.profiles.Profile`. Then
            `source` lends its tokenizer only; the default is the demo model's.
        share: Name of a group of models that take turns on a device: one of them is awake, the others sleep.
        routing: `prefix` sends a request to the replica that has the longest beginning of its prompt in its
            KV cache, if that is not much more loaded than the others. `least_loaded` looks at tokens alone.
        adapters: LoRA adapters that are served beside the model.
        adapters_folder: Directory that all replicas share, or URL, which keeps the adapters that are loaded
            by `POST /v1/load_lora_adapter`; left out: none can be.
    """

    id: ModelId
    kind: Literal["llm"] = "llm"
    source: Annotated[str, Field(min_length=1)]
    engine: EngineSettings = EngineSettings()
    batcher: BatcherSettings = BatcherSettings()
    sampling: SamplingFields = SamplingFields()
    engine_hang_timeout_s: Seconds = 60.0
    grammar_cpu_s: Seconds = 0.1
    grammar_compile_cpu_s: Seconds = 5.0
    max_tokenize_tokens: Positive | None = None
    max_prompt_logprobs: Positive = 32_768
    routing: Literal["prefix", "least_loaded"] = "prefix"
    simulate: Annotated[Profile, BeforeValidator(read_profile)] | None = None
    share: Group | None = None
    adapters: tuple[AdapterSettings, ...] = ()
    adapters_folder: Annotated[str, AfterValidator(_content)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _simulation_needs_no_source(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("simulate") is not None:
            return {"source": DEMO_MODEL, **fields}
        return fields

    @property
    def path(self) -> str:
        """The model that vLLM loads: a directory or a Hugging Face id."""
        if self.source == DEMO_MODEL:
            return str(DEMO_FOLDER / "model")
        return self.source

    @property
    def has_adapters(self) -> bool:
        """True if the engine can run adapters."""
        if self.engine.enable_lora is not None:
            return self.engine.enable_lora
        return bool(self.adapters) or self.adapters_folder is not None

    @property
    def slots(self) -> int:
        """`engine.max_loras` in effect: room for the pinned adapters and others."""
        pinned = sum(adapter.pinned for adapter in self.adapters)
        later = self.adapters_folder is not None or self.engine.enable_lora
        usual = max(len(self.adapters), LATER_SLOTS if later else 1)
        return self.engine.max_loras or max(min(usual, MAX_SLOTS), pinned + 1)

    @property
    def cpu_slots(self) -> int:
        """`engine.max_cpu_loras` in effect: all adapters of the config, up to a bound."""
        most = min(max(len(self.adapters), 4 * self.slots), MAX_CPU_SLOTS)
        return self.engine.max_cpu_loras or max(most, self.slots)

    @model_validator(mode="after")
    def _adapters_fit(self) -> "LLMSettings":
        adapters_by_id(self.id, self.adapters)
        if self.adapters and self.engine.enable_lora is False:
            raise ValueError("engine.enable_lora: must be true, or left out, since there are adapters")
        check_pinned(self.slots, self.adapters)
        return self


def check_pinned(slots: int, adapters: Iterable[AdapterSettings]) -> None:
    """Raise a ValueError if pinned adapters leave no slot to others."""
    pinned = sum(adapter.pinned for adapter in adapters)
    if pinned and pinned >= slots:
        raise ValueError(
            f"adapters: {pinned} are pinned, and the engine has {slots} slots (engine.max_loras), of which "
            "one has to stay free; pin fewer, or raise max_loras"
        )


def _known_profile(name: str) -> str:
    if name not in PROFILES:
        raise ValueError(f"must be one of {', '.join(map(repr, PROFILES))}, not {name!r}")
    return name


class FunctionBatcherSettings(Strict):
    """Batching of records for a function; the settings are arguments of `batcher.DynamicBatcher`.

    Attributes:
        profile: A preset, see `batcher.PROFILES`; other settings override its values.
    """

    profile: Annotated[str, AfterValidator(_known_profile)] | None = None
    target_batch_cost: Positive | None = None
    max_batch_size: Positive | None = None
    min_batch_size: Positive | None = None
    batch_timeout_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    max_queue_size: Positive | None = None
    max_queue_cost: Positive | None = None
    prefetch_batches: NotNegative | None = None
    max_concurrent_batches: Positive | None = None
    forming: Forming | None = None
    padded: Flag | None = None
    on_error: Literal["split", "fail", "single"] | None = None
    tenant_weights: Weights | None = None
    priority_aging_s: Seconds | None = 10.0

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `DynamicBatcher`: the profile's, overridden by those that are set."""
        given = self.model_dump(exclude={"profile", "priority_aging_s"}, exclude_none=True)
        given["priority_aging_s"] = self.priority_aging_s
        return given if self.profile is None else profile(self.profile, **given)

    @model_validator(mode="after")
    def _agree_with_each_other(self) -> "FunctionBatcherSettings":
        # The batcher itself refuses arguments that contradict each other.
        DynamicBatcher(list, **self.arguments())
        return self


def _target(path: str) -> str:
    name = r"[A-Za-z_][A-Za-z0-9_]*"
    if not re.fullmatch(rf"{name}(\.{name})*:{name}", path):
        raise ValueError(f"must have the form 'package.module:Class', not {path!r}")
    return path


class FunctionSettings(Strict):
    """A model that is a function of a batch, served by one deployment, `Engine:<id>`.

    Attributes:
        id: The name that clients put in `model`.
        kind: "function".
        target: Import path of a class with a method `process(batch)`, as "package.module:Class".
        options: Keyword arguments of the class.
        embeddings: Records are texts and results their vectors; `/v1/embeddings` serves the model too.
        batcher: Batching of records.
    """

    id: ModelId
    kind: Literal["function"]
    target: Annotated[str, AfterValidator(_target)]
    options: dict[str, Any] = {}
    embeddings: Flag = False
    batcher: FunctionBatcherSettings = FunctionBatcherSettings()


def _kind(model: object) -> str:
    """Return the kind of a model, which selects the branch of `ModelSettings`."""
    if not isinstance(model, dict):
        return str(getattr(model, "kind", "llm"))
    return str(model.get("kind", "llm"))


ModelSettings = Annotated[
    Annotated[LLMSettings, Tag("llm")] | Annotated[FunctionSettings, Tag("function")], Discriminator(_kind)
]


def _origin(url: str) -> str:
    if url != "*" and not re.fullmatch(r"https?://[^/\s]+", url):
        raise ValueError(f"must be '*' or an origin such as https://chat.example.com, not {url!r}")
    return url


class IngressSettings(Strict):
    """Limits of the HTTP side.

    Attributes:
        max_body_bytes: Largest request body; a larger one is answered 413.
        max_bytes_in_flight: Most bytes of all request bodies that one Ingress replica holds, from their
            arrival to the end of their answers; beyond it 503. By default eight times `max_body_bytes`.
        body_timeout_s: Seconds within which a request body has to arrive; a slower one is answered 408.
        max_prompts: Most prompts in one call, and records in one `/process` call.
        max_tokens: Most tokens per answer that a request may ask for; the default bound is the model's
            context.
        max_n: Most answers per prompt (`n`).
        max_messages: Most messages and parts of their contents, in all chats of a call; and most tools.
        max_values: Most values in a JSON body: texts, objects, lists; of numbers in lists 50 times as many.
        open_adapters: Clients may load and unload adapters where the service asks for no keys.
        allow_origins: Origins of web pages that may call the service (CORS), or "*"; by default none.
    """

    max_body_bytes: Positive = 32 * 1024 * 1024
    max_bytes_in_flight: Positive | None = None
    body_timeout_s: Seconds = 60.0
    max_prompts: Positive = 10_000
    max_tokens: Positive | None = None
    max_n: Positive = 128
    max_messages: Positive = 10_000
    max_values: Positive = 100_000
    open_adapters: Flag = False
    allow_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()

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


def _absolute(path: str) -> str:
    if not Path(path).is_absolute():
        raise ValueError(f"must be an absolute path, on every node that runs an Ingress, not {path!r}")
    return path


class AccessSettings(Strict):
    """Sources of API keys; `serve_app.auth.keys.Key` has the fields of a key.

    Attributes:
        keys_file: A YAML or JSON list of keys. It is read again when it changes.
        keys_env: Environment variable with such a list; it is read once.
        trusted_proxies: Ranges of addresses of the proxies whose `X-Forwarded-For` tells a client's address,
            for keys with `allow_from`. By default the peer of the connection is the client.
    """

    keys_file: Annotated[str, AfterValidator(_absolute)] | None = None
    keys_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    trusted_proxies: tuple[Network, ...] = ()

    @model_validator(mode="after")
    def _has_a_source(self) -> "AccessSettings":
        if self.keys_file is None and self.keys_env is None:
            raise ValueError("give keys_file or keys_env; to serve without API keys, leave access out")
        return self


def _endpoint(url: str) -> str:
    if not re.fullmatch(r"(https?|file)://\S+", url):
        raise ValueError(f"must begin with http://, https:// or file://, not {url!r}")
    return url


class TraceSettings(Strict):
    """Export of OpenTelemetry spans.

    Attributes:
        endpoint: A collector's URL for OTLP over HTTP, such as http://collector:4318/v1/traces; or
            file:///DIRECTORY, where each process writes a file of JSON lines.
        sample_ratio: Sampled share, 0 to 1, of the requests without a trace context. The context of the
            others says whether they are sampled.
    """

    endpoint: Annotated[str, AfterValidator(_endpoint)]
    sample_ratio: Annotated[float, Field(strict=True, ge=0, le=1)] = 1.0


class TelemetrySettings(Strict):
    """Metrics, request log and traces.

    Attributes:
        metrics: Export the service's metrics on Ray's Prometheus endpoint.
        engine_metrics: Export vLLM's metrics there too.
        tenants: Most tenants with a series of their own; the others share one.
        request_log: Format, "json" or "text", of the line that the Ingress writes per request to a file
            beside Serve's logs; null: no log. Prompts and answers are never in it.
        traces: Export of spans; null: none.
    """

    metrics: Flag = True
    engine_metrics: Flag = True
    tenants: Annotated[int, Field(strict=True, ge=0, le=1_000)] = 20
    request_log: Literal["json", "text"] | None = "json"
    traces: TraceSettings | None = None


DAY_S = 86_400


def _database(url: str) -> str:
    if not re.fullmatch(r"postgres(ql)?://\S+", url):
        raise ValueError(
            "must be a URL such as postgresql://USER@HOST/DATABASE; leave it out for SQLite in the folder"
        )
    return url


class BatchesSettings(Strict):
    """Files and batches of OpenAI's API, in a deployment of their own, `Batches`.

    Attributes:
        folder: Directory of the state and the contents, on a volume that outlives the node; it is created
            if missing. One service has it at a time.
        content: Directory or URL of the contents, in place of the folder: `s3://BUCKET/PREFIX`, `gs://...`.
        database: URL of a PostgreSQL database for the state, in place of SQLite in the folder.
        database_env: Environment variable with that URL, which may hold a password.
        max_file_bytes: Largest upload.
        max_tenant_bytes: Most bytes of all uploads of a tenant.
        max_lines: Most rows of a batch.
        max_line_bytes: Most bytes of a row.
        max_open_batches: Most batches of a tenant that haven't ended.
        retention_s: Seconds after which a file is deleted, if its upload doesn't say.
        max_result_bytes: Most bytes of all result files of a tenant; the oldest are deleted beyond it.
        max_rows_in_flight: Most rows that are sent to the engines at once.
    """

    folder: Annotated[str, AfterValidator(_folder)]
    content: Annotated[str, AfterValidator(_content)] | None = None
    database: Annotated[str, AfterValidator(_database)] | None = None
    database_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    max_file_bytes: Positive = 200 << 20
    max_tenant_bytes: Positive = 20 << 30
    max_lines: Positive = 50_000
    max_line_bytes: Positive = 4 << 20
    max_open_batches: Positive = 100
    retention_s: Annotated[int, Field(strict=True, ge=3600)] = 30 * DAY_S
    max_result_bytes: Positive = 100 << 30
    max_rows_in_flight: Positive = 1024

    @model_validator(mode="after")
    def _agree_with_each_other(self) -> "BatchesSettings":
        if self.database and self.database_env:
            raise ValueError("give database or database_env, not both")
        if self.max_line_bytes > self.max_file_bytes:
            raise ValueError(
                f"max_line_bytes: must be at most max_file_bytes, which is {self.max_file_bytes}"
            )
        if self.max_file_bytes > self.max_tenant_bytes:
            raise ValueError(
                f"max_file_bytes: must be at most max_tenant_bytes, which is {self.max_tenant_bytes}"
            )
        return self


class BatchLimits(Strict):
    """Limits of an API key on files and batches, in place of those of `BatchesSettings`.

    Attributes:
        max_file_bytes: Largest upload.
        max_tenant_bytes: Most bytes of all uploads of its tenant when it adds one.
        max_lines: Most rows of a batch.
        max_open_batches: Most batches of its tenant that haven't ended when it creates one.
    """

    max_file_bytes: Positive | None = None
    max_tenant_bytes: Positive | None = None
    max_lines: Positive | None = None
    max_open_batches: Positive | None = None


class LedgerSettings(Strict):
    """Ledger of the calls that the engines ran.

    Attributes:
        folder: Directory, on a volume that outlives the node, or a URL: `s3://BUCKET/PREFIX`, `gs://...`.
            All replicas may have the same.
        format: Form of the files of days that are over, and of all files at a URL; "parquet" needs the extra
            `usage`.
        spool: Directory in which a node keeps rows until they are at the URL.
        upload_s: Seconds after which rows are uploaded to the URL.
        max_spool_bytes: Most bytes that wait for their upload; beyond it rows are dropped, and counted.
        keep_days: Days after which files are removed from the directory; by default never.
    """

    folder: Annotated[str, AfterValidator(_content)]
    format: Literal["parquet", "jsonl"] = "parquet"
    spool: Annotated[str, AfterValidator(_folder)] = "~/.local/state/saturate/usage"
    upload_s: Seconds = 300.0
    max_spool_bytes: Positive = 1 << 30
    keep_days: Positive | None = None


Price = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class PriceSettings(Strict):
    """Price of a model, per million tokens.

    Attributes:
        input: Of prompts; of a function, per million of its records' cost.
        cached_input: Of prompt tokens that are found in the prefix cache; by default as `input`.
        output: Of answers.
        batch_discount: Share, 0 to 1, that rows of `/v1/batches` cost less.
    """

    input: Price
    cached_input: Price | None = None
    output: Price = 0.0
    batch_discount: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0


class Quota(Strict):
    """Limits of a key or of a tenant, for all replicas together. A limit left out doesn't exist.

    A request counts in the windows of the calendar, in UTC, in which it was admitted. Its tokens are those of
    its prompts and of its answers.

    Attributes:
        tokens_per_minute: Most tokens in a minute.
        tokens_per_day: Most tokens in a day.
        tokens_per_month: Most tokens in a month.
        requests_per_minute: Most requests in a minute.
        max_concurrency: Most requests in flight.
    """

    tokens_per_minute: Positive | None = None
    tokens_per_day: Positive | None = None
    tokens_per_month: Positive | None = None
    requests_per_minute: Positive | None = None
    max_concurrency: Positive | None = None


def _state_url(url: str) -> str:
    if not re.fullmatch(r"(postgres(ql)?|rediss?)://\S+", url):
        raise ValueError(
            "must be a URL such as postgresql://USER@HOST/DATABASE or redis://HOST:6379/0; leave it out for "
            "SQLite in the folder"
        )
    return url


class QuotasSettings(Strict):
    """Quotas of keys and tenants, kept by the deployment `Quotas`. Those of keys are in their file.

    Attributes:
        tenants: Quotas by the names of tenants.
        file: YAML or JSON file with more of them, which go before those of `tenants`. It is read again when
            it changes.
        folder: Directory of the state, on a volume that outlives the node; by default that of the batches.
        database: URL of a PostgreSQL or Redis database for the state; by default that of the batches, or
            SQLite in the folder.
        database_env: Environment variable with that URL, which may hold a password.
        when_away: Treatment of requests that no lease covers while the deployment doesn't answer:
            `fail_closed` answers 503, `fail_open` lets each replica grant its share of each limit by itself.
        away_s: Seconds without an answer after which that begins.
    """

    tenants: dict[Tenant, Quota] = {}
    file: Annotated[str, AfterValidator(_absolute)] | None = None
    folder: Annotated[str, AfterValidator(_folder)] | None = None
    database: Annotated[str, AfterValidator(_state_url)] | None = None
    database_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    when_away: Literal["fail_closed", "fail_open"] = "fail_closed"
    away_s: Seconds = 2.0

    @model_validator(mode="after")
    def _has_one_place(self) -> "QuotasSettings":
        if sum(place is not None for place in (self.folder, self.database, self.database_env)) > 1:
            raise ValueError("give one of folder, database and database_env")
        return self


class UsageSettings(Strict):
    """Accounting of what keys and tenants use.

    Attributes:
        quotas: Quotas of keys and tenants; left out: there are none.
        ledger: A row for each call that an engine ran; left out: none are written.
        prices: Prices by the ids of models and adapters, for `saturate usage`. An adapter without a price has
            that of its model.
        currency: Currency of the prices.
    """

    quotas: QuotasSettings | None = None
    ledger: LedgerSettings | None = None
    prices: dict[ServedId, PriceSettings] = {}
    currency: Annotated[str, Field(min_length=1, max_length=16)] = "USD"


NO_USAGE = UsageSettings()

SILENT = TelemetrySettings(metrics=False, engine_metrics=False, request_log=None)
"""Telemetry of a replica outside Ray Serve."""


ASLEEP = 0.02
"""Share of a device that a model keeps while it sleeps: the context of its processes, its graphs."""

UTILIZATION = 0.92
"""vLLM's default of `gpu_memory_utilization`."""


class ShareSettings(Strict):
    """Turns of the models of a group.

    Attributes:
        sleep_level: vLLM's: 1 keeps the weights of a model that sleeps in the memory of the host, 2 loads
            them again for each turn.
        min_turn_s: Seconds of a turn, at least, while its model has work and no other has waited for
            `max_wait_s`.
        max_wait_s: Seconds for which the requests of a model wait at most until the switch to it begins.
        self_check: Compare a greedy answer after each wake-up with that before the first sleep; a model whose
            answer differs is answered 503, and its replica replaced.
    """

    sleep_level: Literal[1, 2] = 1
    min_turn_s: Seconds = 5.0
    max_wait_s: Seconds = 30.0
    self_check: Flag = False


class Settings(Strict):
    """The `args` as a whole.

    Attributes:
        models: The models to serve.
        ingress: Limits of the HTTP side.
        access: API keys; left out: requests need none.
        telemetry: Metrics, request log and traces.
        batches: Files and batches of OpenAI's API; left out: there are none.
        usage: Accounting of what keys and tenants use.
        share_groups: Groups of models that take turns, by the name in `share`; one left out has the defaults.
    """

    models: Annotated[list[ModelSettings], Field(min_length=1)]
    ingress: IngressSettings = IngressSettings()
    access: AccessSettings | None = None
    telemetry: TelemetrySettings = TelemetrySettings()
    batches: BatchesSettings | None = None
    usage: UsageSettings = NO_USAGE
    share_groups: dict[Group, ShareSettings] = {}

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
                    f"{len(models)} models may wait {least:g} s for the others; raise max_wait_s to that, or "
                    "lower min_turn_s"
                )
            simulated = {model.simulate is not None for model in models}
            if len(simulated) > 1:
                raise ValueError(f"share: models of {name!r} are on simulated devices and on real ones")
            for model in models:
                _check_memory(model, models)
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


def _check_memory(model: LLMSettings, group: Sequence[LLMSettings]) -> None:
    """Refuse a model that doesn't fit into its device while the others of its group sleep.

    Raises:
        ValueError: The sum of what they take.
    """
    device, unit = 1.0, ""
    awake = model.engine.gpu_memory_utilization or UTILIZATION
    what = f"lower engine.gpu_memory_utilization of {model.id}, or the number of models in the group"
    if model.simulate is not None:
        if model.simulate.device_gb is None or model.simulate.awake_gb is None:
            return
        device, awake, unit = model.simulate.device_gb, model.simulate.awake_gb, " GB"
        what = "use another profile, or fewer models in the group"
    others = len(group) - 1
    asleep = others * ASLEEP * device
    if awake + asleep > device + 1e-9:
        raise ValueError(
            f"share: the group {model.share!r} doesn't fit its device: {model.id} takes {awake:g}{unit} "
            f"awake, and {others} others {asleep:.3g}{unit} asleep; that is {awake + asleep:.4g} of "
            f"{device:g}{unit}; {what}"
        )


def parse(args: dict[str, Any]) -> Settings:
    """Check the `args` of a Serve config.

    Raises:
        SettingsError: One line per error, with its path, the value and what is allowed.
    """
    try:
        return Settings.model_validate(args)
    except ValidationError as error:
        raise SettingsError(describe_errors(error, _SECTIONS)) from None


_SECTIONS: dict[tuple[str, ...], type[BaseModel]] = {
    (): Settings,
    ("models", "llm"): LLMSettings,
    ("models", "llm", "engine"): EngineSettings,
    ("models", "llm", "batcher"): BatcherSettings,
    ("models", "llm", "batcher", "goals"): GoalSettings,
    ("models", "llm", "sampling"): SamplingFields,
    ("models", "llm", "simulate"): Profile,
    ("models", "llm", "adapters"): AdapterSettings,
    ("models", "function"): FunctionSettings,
    ("models", "function", "batcher"): FunctionBatcherSettings,
    ("ingress",): IngressSettings,
    ("access",): AccessSettings,
    ("telemetry",): TelemetrySettings,
    ("telemetry", "traces"): TraceSettings,
    ("batches",): BatchesSettings,
    ("usage",): UsageSettings,
    ("usage", "ledger"): LedgerSettings,
    ("usage", "prices", "*"): PriceSettings,
    ("usage", "quotas"): QuotasSettings,
    ("usage", "quotas", "tenants", "*"): Quota,
    ("share_groups", "*"): ShareSettings,
}
