"""Prints what vLLM's own application serves, as JSON: its routes with everything switched on, and its schema.

A program of its own, since importing vLLM takes seconds and a gigabyte.
"""

import json
import os
import sys
from typing import Any, get_args


def main() -> None:
    """Print {"routes": [[path, [method, ...]], ...], "openapi": {...}}."""
    os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    from vllm.config import ProfilerConfig
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.pooling.classify import api_router as classify
    from vllm.entrypoints.pooling.embed import api_router as embed
    from vllm.entrypoints.pooling.pooling import api_router as pooling
    from vllm.entrypoints.pooling.scoring import api_router as scoring
    from vllm.tasks import SupportedTask
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.enable_tokenizer_info_endpoint = True
    args.tokens_only = True
    args.profiler_config = ProfilerConfig(profiler="torch", torch_profiler_dir="/tmp")
    app = build_app(args, _tasks(SupportedTask))
    # vLLM adds these for models that embed or score.
    for router in (embed, scoring, classify, pooling):
        app.include_router(router.router)
    routes = [[route.path, sorted(getattr(route, "methods", None) or [])] for route in app.router.routes]
    json.dump({"routes": routes, "openapi": app.openapi()}, sys.stdout)


def _tasks(kind: Any) -> tuple[Any, ...]:
    names: list[Any] = []
    for each in get_args(kind):
        names += _tasks(each) if get_args(each) else [each]
    return tuple(names)


if __name__ == "__main__":
    main()
