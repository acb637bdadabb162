"""Runs HAProxy as a process of Ray Serve does, without a cluster: `python -m … PORT BACKEND ROUTE`.

BACKEND is the port of the only replica, 0: there is none. ROUTE is the application's prefix.
"""

import asyncio
import sys

from serve_app.ingress.haproxy import prepare


async def run(port: int, backend: int, route: str) -> None:
    prepare()
    # Its constants are the environment of the moment at which it is loaded.
    from ray.serve._private.constants import RAY_SERVE_HAPROXY_CONFIG_FILE_LOC
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    options = HTTPOptions(host="0.0.0.0", port=port)
    api = HAProxyApi(HAProxyConfig(http_options=options), {}, RAY_SERVE_HAPROXY_CONFIG_FILE_LOC)
    if backend:
        server = ServerConfig("replica", "127.0.0.1", backend)
        api.set_backend_configs(
            {
                "http-llm": BackendConfig(
                    name="http-llm", path_prefix=route, app_name="llm", servers=[server], health_check_rise=1
                )
            }
        )
    await api.start()
    print("ready", flush=True)
    # The end of standard input ends it.
    await asyncio.to_thread(sys.stdin.read)
    await api.stop()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
