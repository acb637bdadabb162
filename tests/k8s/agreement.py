"""Checks that a RayService agrees with the config that it carries, and with the code."""

import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import yaml
from ray.serve._private.build_app import build_app

from serve_app.app import INGRESS_RESOURCE, build
from serve_app.ingress.status import engine_name
from serve_app.settings.environment import HOOK, VARIABLES
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import parse
from tests.k8s.pods import Pod, of_kind, pods
from tests.k8s.rendering import Document

AGENT_PORT = 52365
"""The path on which Ray's agent on each node answers health checks."""
SERVICE = "saturate-serve-svc"
"""KubeRay's name for the Service of the RayService `saturate`."""
MARGIN_S = 30
"""Seconds that each of the times of a shutdown is longer than the one that it waits for."""

ON_EVERY_POD = [HOOK.name, INGRESS_RESOURCE]
"""Variables that no pod may lack: the application is built on any of them."""


def problems(documents: list[Document]) -> Iterator[str]:
    """Yield what doesn't agree, each with its path."""
    for service in of_kind(documents, "RayService"):
        config = yaml.safe_load(service["spec"]["serveConfigV2"])
        found = list(pods([service]))
        yield from _redis(service["spec"]["rayClusterConfig"], documents)
        for route in of_kind(documents, "HTTPRoute"):
            yield from _route(route, config)
        yield from _groups(service["spec"]["rayClusterConfig"], config)
        yield from _ports(found, config)
        yield from _environment(found)
        yield from _times(service["spec"], config, _variables(found))


def _groups(cluster: dict[str, Any], config: dict[str, Any]) -> Iterator[str]:
    path = "spec.rayClusterConfig"
    if cluster["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield f"{path}.headGroupSpec.rayStartParams.num-cpus: must be '0': the head holds no workload"
    if cluster.get("rayVersion") != version("ray"):
        yield f"{path}.rayVersion: must be that of the image, {version('ray')}"
    (app,) = config["applications"]
    replicas = {deployment["name"]: _replicas(deployment) for deployment in app["deployments"]}
    options = {
        deployment["name"]: deployment.get("ray_actor_options", {}) for deployment in app["deployments"]
    }
    options["Ingress"] = options.get("Ingress") or _by_default(cluster)
    hosts = dict.fromkeys(options, 1)
    for model in parse({"models": app["args"]["models"]}).models:
        if isinstance(model, LLMSettings) and model.bundles:
            # Ray's names are others in bundles.
            asked = {"num_cpus": model.bundles[0]["CPU"], "num_gpus": int(model.bundles[0]["GPU"])}
            options[engine_name(model.id)], hosts[engine_name(model.id)] = asked, model.nodes
    on_gpu = {name for name, option in options.items() if option.get("num_gpus")}
    for index, group in enumerate(cluster["workerGroupSpecs"]):
        here, start = f"{path}.workerGroupSpecs[{index}]", group["rayStartParams"]
        if group["groupName"] == "batch":
            continue
        names = on_gpu if group["groupName"] == "gpu" else set(options) - on_gpu
        cpus = float(start["num-cpus"])
        needed = {name: options[name].get("num_cpus", 1) for name in names}
        if group["groupName"] == "gpu":
            low, high = (sum(replicas[name][end] for name in names) for end in (0, 1))
            if any(cpus != count for count in needed.values()):
                yield f"{here}.rayStartParams.num-cpus: must be what one replica asks for: {needed}"
            if start.get("num-gpus") != str(max(options[name]["num_gpus"] for name in names)):
                yield f"{here}.rayStartParams.num-gpus: must be what one replica asks for"
            if any(group.get("numOfHosts", 1) != hosts[name] for name in names):
                yield f"{here}.numOfHosts: must be the nodes of a replica"
        else:
            # A pod of this group may hold several replicas.
            low, high = (
                -(-sum(replicas[name][end] * needed[name] for name in names) // cpus) for end in (0, 1)
            )
        if group["minReplicas"] != low:
            yield f"{here}.minReplicas: {group['minReplicas']}, but the config's replicas need {low:g} pods"
        if group["maxReplicas"] != high:
            yield f"{here}.maxReplicas: {group['maxReplicas']}, but the config's replicas need {high:g} pods"
        if group.get("replicas") != group["minReplicas"]:
            yield f"{here}.replicas: must be minReplicas: the autoscaler adds the others"
    yield from _places(cluster["workerGroupSpecs"], options)
    if not cluster.get("enableInTreeAutoscaling"):
        yield f"{path}.enableInTreeAutoscaling: must be true"


def _by_default(cluster: dict[str, Any]) -> dict[str, Any]:
    """Return what the application asks for an Ingress in the environment of these pods."""
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    named = [variable["value"] for variable in container["env"] if variable["name"] == INGRESS_RESOURCE]
    return {"resources": dict.fromkeys(named, 0.001)}


def _places(groups: list[dict[str, Any]], options: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Ingress replicas run on the pods that have the API keys, and none takes the cores of an engine."""
    asked = set(options.get("Ingress", {}).get("resources", {}))
    for index, group in enumerate(groups):
        path = f"spec.rayClusterConfig.workerGroupSpecs[{index}].rayStartParams.resources"
        try:
            offered = set(_custom_resources(group["rayStartParams"].get("resources", '"{}"')))
        except ValueError:
            yield f"{path}: Ray's autoscaler can't read it; write '\"{{\\\"NAME\\\": 1}}\"'"
            continue
        fits = asked <= offered and group["rayStartParams"]["num-cpus"] != "0"
        if group["groupName"] == "cpu" and not fits:
            yield f"{path}: must offer what Ingress asks for: {sorted(asked)}"
        if group["groupName"] != "cpu" and fits:
            where = path if asked else "spec.serveConfigV2"
            yield f"{where}: a replica of Ingress may run on a pod of group {group['groupName']}"


def _custom_resources(value: str) -> dict[str, float]:
    """Read custom resources as Ray's autoscaler does."""
    if value[:2] != '"{' or value[-2:] != '}"':
        raise ValueError(value)
    found: dict[str, float] = json.loads(value[1:-1].replace("\\", ""))
    return found


def _replicas(deployment: dict[str, Any]) -> tuple[int, int]:
    scaling = deployment.get("autoscaling_config")
    if scaling is None:
        return deployment["num_replicas"], deployment["num_replicas"]
    return scaling["min_replicas"], scaling["max_replicas"]


def _ports(found: list[Pod], config: dict[str, Any]) -> Iterator[str]:
    host, port = config["http_options"]["host"], config["http_options"]["port"]
    if host != "0.0.0.0":
        yield f"spec.serveConfigV2.http_options.host: must be 0.0.0.0, for other nodes, not {host}"
    for pod in found:
        for container in pod.containers:
            where, number = container.ports.get("serve", (f"{container.path}.ports", None))
            if number != port:
                yield f"{where}: a port named serve must be the config's {port}, not {number}"
            for probe in ("readinessProbe", "livenessProbe"):
                asked = container.spec[probe]["httpGet"]
                if (asked["path"], asked["port"]) not in {
                    ("/api/healthz", AGENT_PORT),
                    ("/-/healthz", "serve"),
                }:
                    yield f"{container.path}.{probe}.httpGet: neither Ray's agent nor HAProxy answers there"


def _environment(found: list[Pod]) -> Iterator[str]:
    for pod in found:
        for container in pod.containers:
            for name in ON_EVERY_POD:
                if name not in container.env:
                    yield f"{container.path}.env: {name} is missing"
            for name, (path, variable) in container.env.items():
                first = found[0].containers[0].env.get(name, ("", {}))[1]
                if (name in ON_EVERY_POD or name.startswith("RAY_SERVE_")) and variable != first:
                    yield f"{path}.value: {variable.get('value')!r}, another pod has {first.get('value')!r}"


def _variables(found: list[Pod]) -> dict[str, str]:
    """Return the variables of Ray's processes: of the pods, and of the setup function."""
    own = {name: variable.get("value", "") for name, (_, variable) in found[0].containers[0].env.items()}
    return {one.name: one.value for one in VARIABLES} | own


def _times(spec: dict[str, Any], config: dict[str, Any], variables: dict[str, str]) -> Iterator[str]:
    """A replica ends with HAProxy's last stream, that within the drain, the drain within the pod."""
    hard_stop = int(variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    (app,) = config["applications"]
    # With API keys the application builds in the environment of a replica only; they change no time.
    args = {name: value for name, value in app["args"].items() if name != "access"}
    for deployment in build_app(build(args), name=app["name"]).deployments:
        seconds = deployment._deployment_config.graceful_shutdown_timeout_s
        if seconds > hard_stop:
            yield f"spec.serveConfigV2: {deployment.name} may drain {seconds} s, HAProxy only {hard_stop}"
    delay = spec.get("rayClusterDeletionDelaySeconds", 60)
    if delay < hard_stop + MARGIN_S:
        yield f"spec.rayClusterDeletionDelaySeconds: {delay}, but HAProxy's streams may take {hard_stop}"
    for index, group in enumerate(spec["rayClusterConfig"]["workerGroupSpecs"]):
        path = f"spec.rayClusterConfig.workerGroupSpecs[{index}].template.spec"
        pod = group["template"]["spec"]
        drain, drain_s = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        if drain != "saturate-drain" or int(drain_s) < hard_stop + MARGIN_S:
            yield f"{path}.containers[0].lifecycle.preStop: must drain for more than HAProxy's {hard_stop} s"
        grace = pod.get("terminationGracePeriodSeconds", 30)
        if grace < int(drain_s) + MARGIN_S:
            yield f"{path}.terminationGracePeriodSeconds: {grace}, but the drain may take {drain_s}"


def _redis(cluster: dict[str, Any], documents: list[Document]) -> Iterator[str]:
    options = cluster.get("gcsFaultToleranceOptions")
    services = {
        f"{service['metadata']['name']}:{port['port']}"
        for service in of_kind(documents, "Service")
        for port in service["spec"]["ports"]
    }
    if options and options.get("redisAddress") not in services:
        yield f"spec.rayClusterConfig.gcsFaultToleranceOptions.redisAddress: none of {sorted(services)}"


def _route(route: Document, config: dict[str, Any]) -> Iterator[str]:
    """The Gateway leaves the end of an answer to HAProxy: a stream may be as long as HAProxy allows."""
    backend = {"name": SERVICE, "port": config["http_options"]["port"]}
    for index, rule in enumerate(route["spec"]["rules"]):
        if rule.get("timeouts", {}).get("request") != "0s":
            yield f"spec.rules[{index}].timeouts.request: must be 0s, for streams of any length"
        if rule["backendRefs"] != [backend]:
            yield f"spec.rules[{index}].backendRefs[0]: must be {backend}"
