"""Settings of models: language models and functions."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from batcher import PROFILES, DynamicBatcher, profile
from batcher.forming import Forming
from serve_app.api.protocol import Flag, SamplingFields
from serve_app.api.routes import (
    CLASSIFY,
    EMBEDDINGS,
    GENERATE,
    GENERATION,
    OPENAI,
    POOLING,
    PROCESS,
    SCORE,
    SPEECH,
    TOKENIZING,
)
from serve_app.settings.adapters import (
    LATER_SLOTS,
    MAX_CPU_SLOTS,
    MAX_SLOTS,
    AdapterSettings,
    adapters_by_id,
)
from serve_app.settings.fields import (
    FolderOrURL,
    Group,
    Host,
    ModelId,
    NotNegative,
    Positive,
    Seconds,
    Strict,
    Weights,
)
from serve_app.settings.serve_options import refusal
from serve_app.settings.sources import DEMO_FOLDER, DEMO_MODEL
from serve_app.simulation.profiles import Profile, read_profile


def _context(tokens: int) -> int:
    if tokens < 1 and tokens != -1:
        raise ValueError(f"must be a number of tokens, or -1 for the longest context that fits, not {tokens}")
    return tokens


Context = Annotated[int, Field(strict=True), AfterValidator(_context)]
"""A context in tokens, or -1: the longest context that fits."""


class EngineSettings(BaseModel):
    """Options of `vllm serve`, by their names with underscores.

    The service reads the options below, too. Other options of vLLM may stand beside them: vLLM's parser
    checks their names and values before the model loads, and `saturate doctor CONFIG` checks them before a
    start. An option left out keeps vLLM's default.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of the model on the hub.",
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = Field(
        default=None,
        description="Type of weights and KV cache; by default the type in which the weights are published.",
    )
    max_model_len: Context | None = Field(
        default=None,
        description=(
            "Context: longest prompt and answer together, in tokens. -1: the longest context that fits into "
            "memory; by default the model's own limit. A longer context leaves space for fewer requests."
        ),
    )
    gpu_memory_utilization: Annotated[float, Field(strict=True, gt=0, le=1)] | None = Field(
        default=None,
        description=(
            "Share of the GPU's memory that vLLM uses; vLLM's default is 0.92. Lower it if the engine runs "
            "out of memory."
        ),
    )
    kv_cache_memory_bytes: Positive | None = Field(
        default=None,
        description="Bytes of KV cache, in place of a share of the memory.",
    )
    kv_cache_dtype: str | None = Field(
        default=None,
        description="Type of the KV cache, such as `fp8`; by default the type of the weights.",
    )
    tensor_parallel_size: Positive | None = Field(
        default=None,
        description=(
            "GPUs that share each layer of a replica. The smallest number whose memory holds the model is "
            "the most efficient."
        ),
    )
    pipeline_parallel_size: Positive | None = Field(
        default=None,
        description="Groups of GPUs, each with some of the layers.",
    )
    max_num_seqs: Positive | None = Field(
        default=None,
        description=(
            "Most sequences in one step of the engine. More: more tokens per second in all, and fewer for "
            "each request."
        ),
    )
    max_num_batched_tokens: Positive | None = Field(
        default=None,
        description=(
            "Most tokens in one step, prompts and answers together. More: long prompts are read sooner, "
            "and delay the next token of other requests for longer."
        ),
    )
    scheduling_policy: Literal["fcfs", "priority"] | None = Field(
        default=None,
        description=(
            "`priority` (the default here) lets live requests go first in the engine; `fcfs` is vLLM's "
            "order of arrival."
        ),
    )
    distributed_executor_backend: str | None = Field(
        default=None,
        description="How vLLM runs the processes of a replica: `mp`, `ray`, `uni`, or the path of a class.",
    )
    enable_lora: Flag | None = Field(
        default=None,
        description="Load LoRA adapters; `adapters` turns it on.",
    )
    max_loras: Positive | None = Field(
        default=None,
        description="Most adapters in one step.",
    )
    max_cpu_loras: Positive | None = Field(
        default=None,
        description="Most adapters in the memory of the machine.",
    )
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] | None = Field(
        default=None,
        description="Highest rank of an adapter.",
    )
    allowed_media_domains: list[Host] | None = Field(
        default=None,
        description="Hosts from which the engine may fetch images, audio and video of a request.",
    )
    runner: Literal["auto", "generate", "pooling"] | None = Field(
        default=None,
        description=(
            "`pooling` for models of embeddings, scores or classes; by default vLLM chooses by the model."
        ),
    )
    convert: Literal["auto", "none", "embed", "classify"] | None = Field(
        default=None,
        description="Turn a generative model into a model of embeddings or classes.",
    )

    def options(self) -> dict[str, Any]:
        """Return the options that are set, by vLLM's names."""
        return {name: value for name, value in self if value is not None}

    @property
    def free(self) -> dict[str, Any]:
        """The options that are set and that only vLLM checks."""
        return {name: value for name, value in (self.model_extra or {}).items() if value is not None}

    @property
    def context(self) -> int | None:
        """`max_model_len`; None: not known before the engine has started."""
        return None if self.max_model_len == -1 else self.max_model_len

    @property
    def pooling_routes(self) -> tuple[str, ...]:
        """Routes that the model may serve as a pooling model; empty if no setting makes it one."""
        if self.runner != "pooling" and self.convert not in ("embed", "classify"):
            return ()
        if self.convert == "embed":
            return (EMBEDDINGS, *SCORE)
        return (*CLASSIFY, *SCORE) if self.convert == "classify" else POOLING

    @model_validator(mode="after")
    def _are_free_here(self) -> "EngineSettings":
        for name in self.model_extra or ():
            if reason := refusal(name):
                raise ValueError(f"{name}: {reason}")
        return self


class GoalSettings(Strict):
    """Latency goals for 99 of 100 requests of the tiers above `flex`; set one or both.

    The scheduler bounds the time of a step accordingly: a token takes a step, and a first token takes the
    request's path to the engine, its own prompt, and two or three steps. `flex` requests get the rest of the
    bound.
    """

    ttft_p99_s: Seconds | None = Field(
        default=None,
        description="Seconds from the arrival of a request at the Ingress to its first token in the engine.",
    )
    tpot_p99_s: Seconds | None = Field(default=None, description="Seconds per token after the first.")

    @model_validator(mode="after")
    def _has_a_goal(self) -> "GoalSettings":
        if self.ttft_p99_s is None and self.tpot_p99_s is None:
            raise ValueError("must have ttft_p99_s, tpot_p99_s, or both")
        return self


class BatcherSettings(Strict):
    """Admission of requests to one Engine replica."""

    policy: Literal["guaranteed_no_evict", "max_utilization"] = Field(
        default="guaranteed_no_evict",
        description=(
            "KV cache that a request reserves. `guaranteed_no_evict`: its prompt and its max_tokens, so that "
            "the memory is always enough for the running requests. `max_utilization`: for `flex` requests "
            "the usual length of their tenant's answers; where answers are shorter than max_tokens, several "
            "times as many requests run at once, and a few may be preempted."
        ),
    )
    capacity_tokens: Positive | None = Field(
        default=None,
        description="Tokens that may be in flight; by default the KV capacity that vLLM reports.",
    )
    max_running: Positive | None = Field(
        default=None,
        description=(
            "Most requests in flight. The default, and the upper bound, is vLLM's `max_num_seqs` plus the "
            "requests that end within two steps: the surplus waits in vLLM, so that no step runs with a free "
            "sequence slot."
        ),
    )
    max_queue_size: Positive = Field(
        default=5_000,
        description=(
            "Most requests that wait in a replica; a further request gets a 429 with Retry-After. Choose the "
            "requests per second of a replica, times the seconds that clients are willing to wait."
        ),
    )
    max_queue_tokens: Positive | None = Field(
        default=None, description="Most tokens that wait; by default only `max_queue_size` bounds the queue."
    )
    tenant_weights: Weights = Field(
        default_factory=dict,
        description="Each tenant's share relative to other tenants; 1.0 where not given.",
    )
    goals: GoalSettings | None = Field(
        default=None,
        description=(
            "Latency goals for the tiers above `flex`; `flex` runs beside them as far as the goals allow. A "
            "change in `user_config` needs no restart. Without goals live requests still go first, and steps "
            "have a default bound."
        ),
    )
    priority_aging_s: Seconds | None = Field(
        default=10.0,
        description=(
            "Seconds of waiting after which one request of a tier goes before the next higher tier; null: "
            "never. After this time a `flex` request also starts like a live request, if live traffic has "
            "kept all `flex` requests waiting."
        ),
    )


class LLMSettings(Strict):
    """A language model in vLLM, served by one Engine deployment, `Engine:<id>`."""

    id: ModelId = Field(description="The name that clients put in `model`.")
    kind: Literal["llm"] = Field(default="llm", description='"llm"; may be left out.')
    source: Annotated[str, Field(min_length=1)] = Field(
        description="A Hugging Face model id, a directory, or `saturate://demo`."
    )
    engine: EngineSettings = Field(default=EngineSettings(), description="vLLM's settings.")
    batcher: BatcherSettings = Field(default=BatcherSettings(), description="Admission to each replica.")
    sampling: SamplingFields = Field(
        default=SamplingFields(), description="Defaults for `/generate` where a request leaves a field out."
    )
    engine_hang_timeout_s: Seconds = Field(
        default=60.0,
        description=(
            "Seconds without a step after which the replica of an engine with work is replaced. The timeout "
            "must exceed the longest step, including a kernel's first compilation."
        ),
    )
    grammar_compile_cpu_s: Seconds = Field(
        default=5.0,
        description=(
            "Seconds of CPU that a JSON schema, a regular expression or another grammar of a request may "
            "take to compile; a slower grammar gets a 400."
        ),
    )
    max_tokenize_tokens: Positive | None = Field(
        default=None,
        description=(
            "Most tokens of a text of `/tokenize`, and of a list of `/detokenize`; null: the tokens of the "
            "context. Texts of other routes must fit into the context."
        ),
    )
    max_answer_values: Positive = Field(
        default=32_768,
        description=(
            "Most values in the answer to one request: its answers (prompts times `n`), and the logprobs of "
            "all tokens of prompts and of answers; streams don't count the logprobs of answers. vLLM makes "
            "them at once on the event loop, 12 µs for each."
        ),
    )
    transfer_keys: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description=(
            "Names of the API keys whose requests may have `kv_transfer_params` and `ec_transfer_params`, "
            "which name hosts and blocks for the engine's connector; all other callers get a 400."
        ),
    )
    routing: Literal["prefix", "least_loaded"] = Field(
        default="prefix",
        description=(
            "`prefix` sends a request to the replica that has the longest beginning of its prompt in its KV "
            "cache, unless that replica is much more loaded than other replicas. `least_loaded` compares "
            "tokens alone."
        ),
    )
    simulate: (
        Annotated[Profile, BeforeValidator(read_profile, json_schema_input_type=Profile | str)] | None
    ) = Field(
        default=None,
        description=(
            "Profile of a simulated device, which takes the model's place: a built-in one by its name, a "
            "YAML file by its absolute path, or the fields of a `serve_app.simulation.profiles.Profile`. "
            "Then only the tokenizer of `source` is used; the default is the demo model's."
        ),
    )
    multimodal: Flag = Field(
        default=False,
        description="Requests may have images, sound and videos; by default such parts get a 400.",
    )
    nodes: Positive = Field(
        default=1,
        description=(
            "Nodes of Ray (machines) that a replica takes, each with an equal part of its GPUs. Above 1 Ray "
            "reserves the GPUs and a core for each, and starts vLLM's workers; `num_gpus` is left out."
        ),
    )
    share: Group | None = Field(
        default=None,
        description=(
            "Name of a group of models that take turns on a device: only one model of the group is awake at "
            "a time."
        ),
    )
    adapters: tuple[AdapterSettings, ...] = Field(
        default=(), description="LoRA adapters that are served beside the model."
    )
    adapters_folder: FolderOrURL | None = Field(
        default=None,
        description=(
            "Directory that all replicas share, or URL, for the adapters loaded by `POST "
            "/v1/load_lora_adapter`; left out: clients can't load adapters."
        ),
    )

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
    def root(self) -> str:
        """The model's source, which clients see."""
        return self.source

    @property
    def routes(self) -> tuple[str, ...]:
        """Routes that the model may serve; vLLM decides which of these it serves."""
        if self.pools:
            return (*self.engine.pooling_routes, *TOKENIZING)
        text = (*GENERATION, *SPEECH) if self.engine.runner == "generate" else OPENAI
        return (GENERATE, *text, *TOKENIZING)

    @property
    def processes(self) -> int:
        """GPUs of a replica, each with a process of vLLM."""
        return (self.engine.tensor_parallel_size or 1) * (self.engine.pipeline_parallel_size or 1)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles of a replica, one for each of its nodes; empty: the replica is on one node."""
        share = self.processes // self.nodes
        return [{"CPU": float(share), "GPU": float(share)}] * self.nodes if self.nodes > 1 else []

    @property
    def pools(self) -> bool:
        """True if the settings make it a pooling model: one result for each prompt, and no text."""
        return bool(self.engine.pooling_routes)

    @property
    def has_context(self) -> bool:
        """True if a request has to fit into a context of the model."""
        return True

    @property
    def context(self) -> int | None:
        """Tokens of the context; None: not known before the engine has started."""
        return self.engine.context

    @property
    def profile(self) -> str | None:
        """Name of the simulated device's profile; None: the device is real."""
        return None if self.simulate is None else self.simulate.name

    @property
    def has_adapters(self) -> bool:
        """True if the engine can run adapters."""
        if self.engine.enable_lora is not None:
            return self.engine.enable_lora
        return bool(self.adapters) or self.adapters_folder is not None

    @property
    def slots(self) -> int:
        """`engine.max_loras` in effect."""
        later = self.adapters_folder is not None or self.engine.enable_lora
        usual = max(len(self.adapters), LATER_SLOTS if later else 1)
        return self.engine.max_loras or min(usual, MAX_SLOTS)

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
        if self.has_adapters and "worker_extension_cls" in self.engine.options():
            raise ValueError(
                "engine.worker_extension_cls: an engine with adapters has saturate's own, which checks "
                "them; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _nodes_have_equal_parts(self) -> "LLMSettings":
        if self.nodes == 1:
            return self
        engine, share = self.engine, self.processes // self.nodes
        parallel = engine.tensor_parallel_size or 1
        if self.processes % self.nodes or (share % parallel and parallel % share):
            raise ValueError(
                f"nodes: {self.nodes} can't have equal parts of tensor_parallel_size {parallel} with "
                f"pipeline_parallel_size {engine.pipeline_parallel_size or 1}, each with whole stages"
            )
        refused = {
            "simulate": (self.simulate, "one process simulates all GPUs"),
            "share": (self.share, "models take turns on the GPUs of one machine"),
            "adapters": (self.has_adapters, "the files of an adapter are on one machine"),
            "engine.distributed_executor_backend": (
                engine.distributed_executor_backend,
                "Ray starts the workers on several nodes",
            ),
        }
        for name, (value, reason) in refused.items():
            if value:
                raise ValueError(f"{name}: must be left out with nodes above 1: {reason}")
        return self

    @model_validator(mode="after")
    def _options_agree(self) -> "LLMSettings":
        if self.engine.allowed_media_domains and not self.multimodal:
            raise ValueError("multimodal: must be true, since engine.allowed_media_domains names hosts")
        if self.engine.pooling_routes and self.simulate is not None:
            raise ValueError("engine.runner: a simulated device runs no pooling model; leave simulate out")
        if self.engine.pooling_routes and self.sampling.sampling():
            raise ValueError("sampling: a pooling model samples nothing; leave it out")
        return self


def _known_profile(name: str) -> str:
    if name not in PROFILES:
        raise ValueError(f"must be one of {', '.join(map(repr, PROFILES))}, not {name!r}")
    return name


class FunctionBatcherSettings(Strict):
    """Batching of records for a function; the settings are arguments of `batcher.DynamicBatcher`."""

    profile: Annotated[str, AfterValidator(_known_profile)] | None = Field(
        default=None, description="A preset, see `batcher.PROFILES`; other settings override its values."
    )
    target_batch_cost: Positive | None = Field(default=None, description="Most cost of a batch.")
    max_batch_size: Positive | None = Field(default=None, description="Most records in a batch.")
    min_batch_size: Positive | None = Field(
        default=None, description="Fewest records in a batch, unless `batch_timeout_s` has passed."
    )
    batch_timeout_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Longest wait of a record for further records while the function is free, in seconds.",
    )
    max_queue_size: Positive | None = Field(default=None, description="Records that may wait.")
    max_queue_cost: Positive | None = Field(default=None, description="Cost of the records that may wait.")
    prefetch_batches: NotNegative | None = Field(
        default=None,
        description=("Above 0, `sorted` and `bucketed` choose a full batch while the function is busy."),
    )
    max_concurrent_batches: Positive | None = Field(
        default=None, description="Calls of the function that may run at once."
    )
    forming: Forming | None = Field(
        default=None,
        description=(
            "Records of a batch: `arrival` takes them in order of arrival, `sorted` and `bucketed` take "
            "records of similar cost."
        ),
    )
    padded: Flag | None = Field(
        default=None,
        description="The cost of a batch is its costliest record times the number of records, not the sum.",
    )
    on_error: Literal["split", "fail", "single"] | None = Field(
        default=None,
        description=(
            "When the function raises an error: `split` runs parts of the batch again until the records that "
            "cause it are alone, `single` runs each record again by itself, `fail` fails the whole batch."
        ),
    )
    tenant_weights: Weights | None = Field(
        default=None, description="Each tenant's share relative to other tenants; 1.0 where not given."
    )
    priority_aging_s: Seconds | None = Field(
        default=10.0,
        description="Seconds after which a record that waits moves up one tier; null: never.",
    )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `DynamicBatcher`: the profile's values, overridden by the settings here."""
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
    """A model that is a function of a batch, served by one deployment, `Engine:<id>`."""

    id: ModelId = Field(description="The name that clients put in `model`.")
    kind: Literal["function"] = Field(description='"function".')
    target: Annotated[str, AfterValidator(_target)] = Field(
        description='Import path of a class with a method `process(batch)`, as "package.module:Class".'
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")
    embeddings: Flag = Field(
        default=False,
        description="Records are texts and results their vectors; `/v1/embeddings` serves the model too.",
    )
    batcher: FunctionBatcherSettings = Field(
        default=FunctionBatcherSettings(), description="Batching of records."
    )

    # A function has the properties of a language model too, so that few callers check the kind.
    adapters: ClassVar[tuple[AdapterSettings, ...]] = ()
    has_adapters: ClassVar[bool] = False
    has_context: ClassVar[bool] = False
    context: ClassVar[int | None] = None
    pools: ClassVar[bool] = True
    profile: ClassVar[str | None] = None
    share: ClassVar[str | None] = None

    @property
    def root(self) -> str:
        """The class, which clients see as the model's source."""
        return self.target

    @property
    def routes(self) -> tuple[str, ...]:
        """Routes that the model serves."""
        return (PROCESS, EMBEDDINGS) if self.embeddings else (PROCESS,)


def _kind(model: object) -> str:
    """Return the kind of a model, which selects the branch of `ModelSettings`."""
    if not isinstance(model, dict):
        return str(getattr(model, "kind", "llm"))
    return str(model.get("kind", "llm"))


ModelSettings = Annotated[
    Annotated[LLMSettings, Tag("llm")] | Annotated[FunctionSettings, Tag("function")], Discriminator(_kind)
]
