"""Options of `vllm serve` that this service does itself, each with the setting that takes its place.

All other options go to `engine`: the engine, or vLLM's application behind the Ingress, reads them. A test
lists the place of each option of vLLM's HTTP server.
"""

from collections.abc import Mapping

COPIES = "`deployment.num_replicas` gives the copies of the model (--set deployment.num_replicas=N)"
EXPERTS = (
    f"{COPIES}; with tensor_parallel_size, enable_expert_parallel spreads the experts of a model over the "
    "GPUs of a copy"
)
NODES = "`nodes` of a model in a config gives the machines of a replica, and Ray starts the workers"
TLS = "the service speaks plain HTTP, on 127.0.0.1 by default; put the certificate on a proxy in front"
LISTENS = "the service listens on --host and --port (`http_options` of a config)"
ACCESS_LOG = (
    "`telemetry.request_log` is the log of requests; --log-format prints it (`saturate serve --help`)"
)
LOG_LEVEL = (
    "VLLM_LOGGING_LEVEL in the environment, or in `runtime_env.env_vars` of a config, sets the log level"
)
CORS = "`ingress.allow_origins` names the web pages that may call, with every method and header of the routes"
HEADERS = "HAProxy bounds the headers; `ingress.max_body_bytes` bounds the body"
CLOSED = "the service keeps that route closed; `/stats` and Ray's Prometheus endpoint report its state"
PAGES = "the Ingress has its own pages and documents (the page Routes)"
SCALE_OUT = "the service has no routes of that kind; `/v1/completions` takes token ids as prompts"
HANDLES = "the service speaks HTTP; programs in the cluster call it by handle (`saturate batch --app`)"

REFUSED: Mapping[str, str] = {
    "model": "name the model as the argument: saturate serve MODEL (`source` of a config)",
    "config": "that is vLLM's file of options: give them on the command line, or under `engine` of a config "
    "(saturate serve MODEL --print-config)",
    "api_key": "`saturate keys new` makes keys; --set access.keys_file=/etc/saturate/keys.yaml asks for them",
    "headless": COPIES,
    "api_server_count": "`num_replicas` of the deployment `Ingress` in a config gives the processes of the "
    "HTTP side (--print-config prints it)",
    "grpc": HANDLES,
    "grpc_port": HANDLES,
    "uds": LISTENS,
    "ssl_keyfile": TLS,
    "ssl_certfile": TLS,
    "ssl_ca_certs": TLS,
    "ssl_cert_reqs": TLS,
    "ssl_ciphers": TLS,
    "enable_ssl_refresh": TLS,
    "root_path": "`route_prefix` of the application in a config sets it (--print-config prints it)",
    "middleware": "requests pass the Ingress first: `access`, `ingress` and `telemetry` of a config have "
    "keys, limits and logs, and a proxy in front can do the rest",
    "allow_credentials": CORS,
    "allowed_methods": CORS,
    "allowed_headers": CORS,
    "enable_request_id_headers": "the Ingress always answers with X-Request-Id; leave it out",
    "disable_fastapi_docs": PAGES,
    "enable_offline_docs": PAGES,
    "h11_max_incomplete_event_size": HEADERS,
    "h11_max_header_count": HEADERS,
    "uvicorn_log_level": LOG_LEVEL,
    "disable_uvicorn_access_log": ACCESS_LOG,
    "disable_access_log_for_endpoints": ACCESS_LOG,
    "log_level": LOG_LEVEL,
    "log_config_file": LOG_LEVEL,
    "logging_config": LOG_LEVEL,
    "aggregate_engine_logging": "a replica has one engine, and `/stats` has its figures",
    "enable_server_load_tracking": CLOSED,
    "enable_tokenizer_info_endpoint": CLOSED,
    "tokens_only": SCALE_OUT,
    "enable_scale_out": SCALE_OUT,
    "cohere_is_reasoning_model": "the service has no /cohere routes; `/v1/chat/completions` serves the model",
    "enable_flash_late_interaction": "`engine.pooler_config: {enable_flash_late_interaction: false}` "
    "turns it off in the engine",
    "data_parallel_size": EXPERTS,
    "data_parallel_rank": COPIES,
    "data_parallel_start_rank": COPIES,
    "data_parallel_size_local": COPIES,
    "data_parallel_address": COPIES,
    "data_parallel_rpc_port": COPIES,
    "data_parallel_backend": COPIES,
    "data_parallel_hybrid_lb": COPIES,
    "data_parallel_external_lb": COPIES,
    "data_parallel_multi_port_external_lb": COPIES,
    "data_parallel_supervisor_port": COPIES,
    "dp_supervisor_probe_interval_s": COPIES,
    "dp_supervisor_probe_timeout_s": COPIES,
    "dp_supervisor_probe_failure_threshold": COPIES,
    "device_ids": "Ray gives each replica its GPUs; CUDA_VISIBLE_DEVICES hides GPUs from Ray",
    "nnodes": NODES,
    "node_rank": NODES,
    "master_addr": NODES,
    "master_port": NODES,
}
"""Refused options, each with the reason or the replacement."""

MOVED: Mapping[str, str] = {
    "host": "http_options.host",
    "port": "http_options.port",
    "served_model_name": "id of the model",
    "lora_modules": "adapters of the model",
    "allowed_origins": "args.ingress.allow_origins",
}
"""Options of the command line that become settings of this service, and the paths of these settings."""


def refusal(name: str) -> str | None:
    """Return why `engine` may not have an option, with the setting in its place; None if it may."""
    if name == "extra":
        return "its options go directly under engine, as in engine: {max_logprobs: 50}"
    if name in MOVED:
        return f"set {MOVED[name]} instead; under engine it does nothing"
    return REFUSED.get(name)
