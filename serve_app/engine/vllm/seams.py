"""Names of vLLM that are not public: the use of each, the issue, the version that ends it, and a guard.

Public is what vLLM's documentation names for use from outside: the client and its options, parameters,
outputs and errors, the protocol of the OpenAI server, the benchmark of `vllm bench serve`, and the points
where vLLM takes in other classes (executor, statistics, parsers) with the types that these points pass.
`PUBLIC` has these names. `SEAMS` has all others; the package imports them from here:

    from serve_app.engine.vllm.seams import build_app

`check` looks for them before a model loads, and `make check-vllm` looks for the names of both tables in the
sources of another release. No name is imported before it is asked for: vLLM's plugins load while vLLM imports
itself.
"""

import importlib
from typing import Any

from serve_app.system.seams import Seam, load, look_for

PUBLIC: dict[str, str] = {
    "vllm": "SamplingParams envs",
    "vllm.benchmarks.datasets": "SampleRequest",
    "vllm.benchmarks.serve": "TaskType benchmark",
    "vllm.config": "VllmConfig",
    "vllm.engine.arg_utils": "AsyncEngineArgs",
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest",
    "vllm.entrypoints.pooling.scoring.protocol": "RerankRequest",
    "vllm.entrypoints.serve.engine.protocol": "ErrorResponse",
    "vllm.exceptions": "GenerationError GracefulHTTPError VLLMClientError VLLMValidationError",
    "vllm.inputs.engine": "tokens_input",
    "vllm.logger": "init_logger",
    "vllm.lora.request": "LoRARequest",
    "vllm.outputs": "PoolingRequestOutput RequestOutput",
    "vllm.platforms": "current_platform",
    "vllm.pooling_params": "PoolingParams",
    "vllm.reasoning": "ReasoningParserManager",
    "vllm.sampling_params": "BeamSearchParams RequestOutputKind SamplingParams StructuredOutputsParams",
    "vllm.tokenizers": "cached_tokenizer_from_config",
    "vllm.tool_parsers": "ToolParserManager",
    "vllm.usage.usage_lib": "UsageContext",
    "vllm.utils.argparse_utils": "FlexibleArgumentParser",
    "vllm.v1.core.sched.output": "GrammarOutput SchedulerOutput",
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.v1.engine.exceptions": "EngineDeadError EngineGenerateError",
    "vllm.v1.executor.abstract": "Executor",
    "vllm.v1.kv_cache_interface": "FullAttentionSpec KVCacheSpec",
    "vllm.v1.metrics.loggers": "StatLoggerBase",
    "vllm.v1.metrics.stats": "IterationStats SchedulerStats",
    "vllm.v1.outputs": "EMPTY_MODEL_RUNNER_OUTPUT LogprobsLists ModelRunnerOutput",
}
"""Public names, by module."""


APPLICATION = "vLLM's OpenAI server is an application inside a replica"
ERRORS = "errors of that application have OpenAI's shape, and faults of the service are a 500"
FIRST = "rows give way to live requests, step by step"
COUNTS = "the tokens of a request are counted where vLLM counts them"
GRAMMARS = "grammars are compiled in a process of their own, by vLLM's compiler"
RESUMED = "a stream goes on in another engine with the text of all its tokens"
UNUSED = "the tensors of an adapter that no layer uses are named"
VIRTUAL = "`saturate plan` runs vLLM's engine core on a virtual clock"
NODES = "a model runs on several nodes, with the GPUs of a node in one bundle"
LONG = "texts are counted and tokenized without holding the event loop"

SEAMS: dict[str, Seam] = {
    # The application.
    "build_app": Seam("vllm.entrypoints.launchers.app", APPLICATION),
    "init_app_state": Seam("vllm.entrypoints.launchers.api_server.app_state", APPLICATION),
    "make_arg_parser": Seam(
        "vllm.entrypoints.common.cli_args",
        "the options of `vllm serve` with their defaults, which that application reads",
        before="vllm.entrypoints.launchers.cli_args",
    ),
    "validate_parsed_serve_args": Seam(
        "vllm.entrypoints.common.cli_args",
        "options that need each other are told before the model loads",
        before="vllm.entrypoints.launchers.cli_args",
    ),
    "OpenAIServingModels": Seam("vllm.entrypoints.openai.models.serving", "adapters", "lora_requests"),
    "enable_envs_cache": Seam("vllm.envs", "vLLM asks the environment several times per request"),
    "exception_handler": Seam("vllm.entrypoints.serve.exception_handling.handlers.exception", ERRORS),
    "http_exception_handler": Seam("vllm.entrypoints.serve.exception_handling.handlers.http", ERRORS),
    "create_error_response": Seam("vllm.entrypoints.serve.exception_handling.error_response", ERRORS),
    "BeamSearchOnlineMixin": Seam(
        "vllm.entrypoints.generate.beam_search.online", "a beam search has one slot", "beam_search"
    ),
    "HfRenderer": Seam(
        "vllm.renderers.hf",
        LONG,
        "_tokenize_prompt _tokenize_prompt_async _apply_chat_template_async",
    ),
    "safe_apply_chat_template": Seam("vllm.renderers.hf", "a short chat is rendered on the event loop"),
    "ServingScores": Seam("vllm.entrypoints.pooling.scoring.serving", LONG, "_preprocessing io_processor"),
    "CrossEncoderIOProcessor": Seam(
        "vllm.entrypoints.pooling.scoring.io_processor",
        LONG,
        "get_request_factory_online render_async renderer model_config",
    ),
    "KVCacheConfig": Seam(
        "vllm.v1.kv_cache_interface",
        "a block of the KV cache is zeroed when a request gets it, since another request may have left NaN",
        "needs_kv_cache_zeroing",
        "https://github.com/vllm-project/vllm/pull/50283, with the option --enable-nan-fault-tolerance",
    ),
    "lora_ops": Seam(
        "vllm.lora.ops.torch_ops",
        "on a CPU, requests without an adapter stay without one",
        "bgmv_shrink bgmv_expand bgmv_expand_slice",
        "https://github.com/vllm-project/vllm/pull/48421",
        ends=(0, 33),
    ),
    "punica_cpu": Seam(
        "vllm.lora.punica_wrapper",
        "on a CPU, requests without an adapter stay without one",
        "bgmv_shrink bgmv_expand bgmv_expand_slice",
        "https://github.com/vllm-project/vllm/pull/48421",
        ends=(0, 33),
    ),
    "structured_outputs_to_format": Seam("vllm.parser.abstract_parser", GRAMMARS),
    "backend_xgrammar": Seam(
        "vllm.v1.structured_output", GRAMMARS, "validate_xgrammar_grammar choice_as_grammar"
    ),
    "backend_guidance": Seam("vllm.v1.structured_output", GRAMMARS, "validate_guidance_grammar"),
    "backend_outlines": Seam(
        "vllm.v1.structured_output", GRAMMARS, "validate_structured_output_request_outlines"
    ),
    "backend_lm_format_enforcer": Seam(
        "vllm.v1.structured_output", GRAMMARS, "validate_structured_output_request_lm_format_enforcer"
    ),
    # Grammars.
    "StructuredOutputManager": Seam("vllm.v1.structured_output", GRAMMARS, "tokenizer backend grammar_init"),
    "StructuredOutputRequest": Seam(
        "vllm.v1.structured_output.request", GRAMMARS, "from_sampling_params structured_output_key grammar"
    ),
    "StructuredOutputOptions": Seam("vllm.v1.structured_output.backend_types", GRAMMARS, "JSON_OBJECT"),
    "get_structured_output_key": Seam("vllm.v1.structured_output.request", GRAMMARS),
    # Streams that go on.
    "IncrementalDetokenizer": Seam(
        "vllm.v1.engine.detokenizer",
        RESUMED,
        "from_new_request update num_output_tokens get_next_output_text output_token_ids",
    ),
    "InputProcessor": Seam("vllm.v1.engine.input_processor", RESUMED, "generation_config_fields renderer"),
    "SamplingParams": Seam(
        "vllm.sampling_params",
        RESUMED,
        "update_from_generation_config all_stop_token_ids skip_clone output_text_buffer_length "
        "_validate_structured_outputs",
    ),
    # Adapters.
    "is_base_embedding_weights": Seam("vllm.lora.utils", UNUSED),
    "parse_fine_tuned_lora_name": Seam("vllm.lora.utils", UNUSED),
    "FusedMoE3DWithLoRA": Seam("vllm.lora.layers", UNUSED),
    "WorkerLoRAManager": Seam("vllm.lora.worker_manager", UNUSED, "_adapter_manager"),
    "LoRAModelManager": Seam(
        "vllm.lora.model_manager",
        UNUSED,
        "model modules packed_modules is_pooling_model supported_modules_to_save",
    ),
    # The client, its statistics and spans.
    "AsyncLLM": Seam(
        "vllm.v1.engine.async_llm",
        "requests run in slots of the batcher, and are counted",
        "add_request _add_request abort output_processor input_processor logger_manager observability_config",
    ),
    "OutputProcessor": Seam(
        "vllm.v1.engine.output_processor",
        COUNTS,
        "request_states parent_requests has_unfinished_requests tracing_enabled",
    ),
    "RequestState": Seam(
        "vllm.v1.engine.output_processor",
        COUNTS,
        "request_id stats is_prefilling prompt_len num_cached_tokens detokenizer",
    ),
    "ParentRequest": Seam("vllm.v1.engine.parallel_sampling", COUNTS, "child_requests"),
    "RequestStateStats": Seam("vllm.v1.metrics.stats", COUNTS, "num_generation_tokens"),
    "StatLoggerManager": Seam("vllm.v1.metrics.loggers", "there is one logger of statistics", "stat_loggers"),
    "PrometheusStatLogger": Seam("vllm.v1.metrics.loggers", "vLLM's own logger, which nobody reads, goes"),
    "RayKVConnectorProm": Seam(
        "vllm.v1.metrics.ray_wrappers", "the metrics of each KV connector, by its own class", "observe"
    ),
    "SchedulerStats": Seam(
        "vllm.v1.metrics.stats",
        "metrics, figures of the scheduler, and the steps since the last message",
        "num_running_reqs num_waiting_reqs num_skipped_waiting_reqs kv_cache_usage prefix_cache_stats "
        "connector_prefix_cache_stats spec_decoding_stats kv_connector_stats num_kv_fetch_reqs_by_stage "
        "step_counter",
    ),
    "IterationStats": Seam(
        "vllm.v1.metrics.stats",
        "metrics, and the counts that the ledger is compared with",
        "num_prompt_tokens num_generation_tokens num_preempted_reqs time_to_first_tokens_iter "
        "finished_requests",
    ),
    "FinishedRequestStats": Seam(
        "vllm.v1.metrics.stats", "metrics", "mean_time_per_output_token e2e_latency"
    ),
    "PrefixCacheStats": Seam("vllm.v1.metrics.stats", "metrics", "queries hits"),
    "SpecDecodingStats": Seam(
        "vllm.v1.spec_decode.metrics", "metrics", "num_drafts num_draft_tokens num_accepted_tokens"
    ),
    # The scheduler: vLLM calls `scheduler_cls` an interface that isn't public, and warns of changes.
    "Scheduler": Seam(
        "vllm.v1.core.sched.scheduler",
        FIRST + "; few messages are sent",
        "add_request has_requests schedule get_grammar_bitmask update_from_output make_stats "
        "running waiting kv_holding_waiting requests finished_recving_kv_req_ids kv_cache_manager "
        "kv_cache_config scheduler_config vllm_config lora_config observability_config max_model_len "
        "max_num_scheduled_tokens max_num_active_reqs num_waiting_for_streaming_input num_lookahead_tokens "
        "num_spec_tokens requires_kv_delivery scheduler_reserve_full_isl need_mamba_block_aligned_split "
        "current_step is_encoder_decoder encoder_cache_manager "
        "return_sampling_mask aux_output_connector _mamba_block_aligned_split _try_schedule_encoder_inputs "
        "_reserve_prefill_lookahead _preempt_request _request_blocks_can_be_freed "
        "_update_request_with_output",
    ),
    "DiffusionScheduler": Seam("vllm.v1.core.sched.diffusion_scheduler", "the base for diffusion models"),
    "DiffusionAsyncScheduler": Seam(
        "vllm.v1.core.sched.diffusion_scheduler", "the base for diffusion models"
    ),
    "Request": Seam(
        "vllm.v1.request",
        FIRST + "; few messages are sent",
        "request_id priority status sampling_params lora_request structured_output_request resumable "
        "num_tokens num_tokens_with_spec num_computed_tokens num_prompt_tokens num_output_tokens "
        "num_output_placeholders is_prefill_chunk has_encoder_inputs get_num_encoder_embeds "
        "mm_features next_decode_eligible_step __lt__",
    ),
    "EncoderCacheManager": Seam(
        "vllm.v1.core.encoder_cache_manager",
        FIRST,
        "can_allocate get_cached_input_ids get_cached_num_encoder_embeds",
    ),
    "RequestStatus": Seam(
        "vllm.v1.request", FIRST, "RUNNING WAITING_FOR_REMOTE_KVS WAITING_FOR_STREAMING_REQ"
    ),
    "PriorityRequestQueue": Seam(
        "vllm.v1.core.sched.request_queue",
        FIRST,
        "add_request remove_request remove_requests __iter__ __len__",
    ),
    "SchedulerOutput": Seam(
        "vllm.v1.core.sched.output",
        FIRST,
        "num_scheduled_tokens total_num_scheduled_tokens scheduled_encoder_inputs "
        "scheduled_spec_decode_tokens pending_structured_output_tokens",
    ),
    "ModelRunnerOutput": Seam("vllm.v1.outputs", FIRST, "sampled_token_ids req_id_to_index"),
    "KVCacheManager": Seam(
        "vllm.v1.core.kv_cache_manager",
        FIRST,
        "get_computed_blocks empty_kv_cache_blocks watermark_blocks coordinator block_pool",
    ),
    "KVCacheBlocks": Seam("vllm.v1.core.kv_cache_manager", FIRST, "blocks"),
    "KVCacheCoordinator": Seam("vllm.v1.core.kv_cache_coordinator", FIRST, "get_num_blocks_to_allocate"),
    "BlockPool": Seam("vllm.v1.core.block_pool", FIRST, "get_num_free_blocks"),
    # Several nodes.
    "ray_executor_v2": Seam(
        "vllm.v1.executor",
        NODES,
        "RayExecutorV2 RayWorkerProc initialize_ray_cluster get_bundles_sorted_by_node",
    ),
    "RayExecutorV2": Seam(
        "vllm.v1.executor.ray_executor_v2", NODES, "_init_executor _get_actor_resource_kwargs world_size"
    ),
    "RayWorkerProc": Seam("vllm.v1.executor.ray_executor_v2", NODES, "get_node_and_physical_gpu_ids"),
    # The virtual engine.
    "EngineCore": Seam(
        "vllm.v1.engine.core",
        VIRTUAL,
        "preprocess_add_request add_request step_fn post_step scheduler batch_queue",
    ),
    "EngineCoreRequest": Seam("vllm.v1.engine", VIRTUAL),
}
"""Names that are not public."""


def installed() -> tuple[int, ...]:
    """Return the version of vLLM that is installed: its first two numbers."""
    found = importlib.import_module("vllm.version").__version_tuple__
    return tuple(int(number) for number in found[:2])


def ended(name: str) -> bool:
    """Return whether the installed vLLM needs a name no more."""
    return SEAMS[name].ended(installed())


def check() -> None:
    """Look for all names in the installed vLLM.

    Raises:
        RuntimeError: It has some of them no more; the error has them all, with the use of each.
    """
    look_for(SEAMS, "vLLM", installed())


def __getattr__(name: str) -> Any:
    """Import a name of `SEAMS`."""
    return load(SEAMS, name)
