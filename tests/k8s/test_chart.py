"""The Helm chart: the objects of the overlays, and an error for values that can't work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.helm import NAME, renamed
from tests.k8s import checks
from tests.k8s.chart import ChartError, lint, merged, needs_helm, notes, overlay_values, render_chart
from tests.k8s.pods import of_kind, pods
from tests.k8s.reach import NODE
from tests.k8s.rendering import OVERLAYS, REPOSITORY, Document, render, with_components
from tests.k8s.schemas import needs_crds

pytestmark = needs_helm

OPTIONS: dict[str, dict[str, Any]] = {
    "api-keys": {"apiKeys": {"secret": "saturate-api-keys"}},
    "batch-group": {"batchGroup": {"enabled": True}},
    "cache-per-pod": {"cache": {"perPod": True, "size": "64Gi"}},
    "incremental-upgrade": {"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}},
    "http-route": {"httpRoute": {"host": "llm.example.com"}},
    "observability": {"observability": {"enabled": True}},
    "redis": {"redis": {"enabled": True}},
}
"""Values in the place of each component."""

WITH_GPUS = [overlay for overlay in OVERLAYS if overlay.name != "demo-cpu"]
PAIRS = [(overlay, option) for overlay in OVERLAYS for option in OPTIONS if option != "cache-per-pod"]
PAIRS += [(overlay, "cache-per-pod") for overlay in WITH_GPUS]

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS, ids=[path.name for path in OVERLAYS])


def by_name(documents: list[Document]) -> dict[tuple[str, str], Document]:
    """Return the documents by kind and name."""
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents)
    return found


@every_overlay
def test_the_values_of_an_overlay_render_the_objects_of_the_overlay(overlay: Path) -> None:
    assert by_name(render_chart(overlay_values(overlay.name))) == by_name(render(overlay))


@pytest.mark.parametrize(("overlay", "option"), PAIRS, ids=[f"{path.name}-{name}" for path, name in PAIRS])
def test_an_option_renders_the_objects_of_its_component(overlay: Path, option: str, tmp_path: Path) -> None:
    chart = by_name(render_chart(merged(overlay_values(overlay.name), OPTIONS[option])))
    kustomize = by_name(render(with_components(overlay, [option], tmp_path)))
    if option == "api-keys":
        # A component can't change the text of the config; the page says which lines to change.
        key = ("RayService", "saturate")
        text = kustomize[key]["spec"]["serveConfigV2"]
        assert "# access:\n" in text
        wanted = text.replace("# access:\n", "access:\n").replace("#   keys_file:", "  keys_file:")
        kustomize[key]["spec"]["serveConfigV2"] = wanted
    assert chart == kustomize


@needs_crds
@pytest.mark.parametrize("overlay", WITH_GPUS, ids=lambda path: path.name)
def test_nothing_is_wrong_with_all_options(overlay: Path) -> None:
    assert checks.problems(render_chart(merged(overlay_values(overlay.name), *OPTIONS.values()))) == []


@needs_crds
@pytest.mark.parametrize("option", ["", *OPTIONS])
def test_nothing_is_wrong_with_the_defaults_and_an_option(option: str) -> None:
    assert checks.problems(render_chart(OPTIONS.get(option))) == []


@pytest.mark.parametrize("name", ["", *(path.name for path in OVERLAYS)])
def test_lint_finds_nothing(name: str) -> None:
    assert lint(overlay_values(name) if name else None) == []


# Names


def test_two_releases_share_no_object_and_reach_no_pod_of_each_other() -> None:
    everything = merged(*OPTIONS.values())
    one, two = render_chart(everything, "one"), render_chart(everything, "two")
    assert not by_name(one).keys() & by_name(two).keys()
    for document in of_kind(one, "NetworkPolicy") + of_kind(one, "PodDisruptionBudget"):
        spec = document["spec"]
        selectors = [spec.get("podSelector") or spec["selector"]]
        for rule in spec.get("ingress", []):
            selectors += [peer["podSelector"] for peer in rule["from"] if "namespaceSelector" not in peer]
        for pod in pods(two):
            labels = pod.labels | {NODE: "head" if pod.group == "head" else "worker"}
            for selector in selectors:
                wanted = selector["matchLabels"].items()
                assert not wanted <= labels.items(), (document["metadata"]["name"], pod.group)


def test_another_name_changes_the_names_of_the_objects_and_nothing_else() -> None:
    everything = merged(*OPTIONS.values())
    usual, named = render_chart(everything), render_chart(everything | {"name": "other"}, "any")
    text = yaml.safe_dump(renamed(usual)).replace(NAME, "other")
    # The Secrets are the user's.
    assert by_name(yaml.safe_load(text)) == by_name(named)


def test_the_notes_name_the_services_and_the_missing_keys() -> None:
    assert "service/llm-serve-svc" in notes(release="llm")
    assert "apiKeys.secret" in notes(release="llm")
    assert "apiKeys.secret" not in notes(OPTIONS["api-keys"])


# Values


def service(values: dict[str, Any]) -> Any:
    """Return the spec of the RayService."""
    (found,) = of_kind(render_chart(values), "RayService")
    return found["spec"]


def test_images_of_a_registry_need_its_secrets() -> None:
    images = {"registry": "registry.example.com/team/", "tag": "1.2", "pullSecrets": ["registry"]}
    documents = render_chart({"images": images, **OPTIONS["batch-group"]})
    found = {pod.group: pod.spec for pod in pods(documents)}
    named = {group: spec["containers"][0]["image"] for group, spec in found.items()}
    front = "registry.example.com/team/saturate-front:1.2"
    assert named == {"head": front, "cpu": front, "batch": front} | {
        "gpu": "registry.example.com/team/saturate-gpu:1.2"
    }
    assert all(spec["imagePullSecrets"] == [{"name": "registry"}] for spec in found.values())


def test_an_image_with_a_digest_has_no_tag() -> None:
    digest = f"sha256:{'0' * 64}"
    images = {
        "registry": "localhost:5000",
        "front": f"saturate-front@{digest}",
        "gpu": f"saturate-gpu@{digest}",
    }
    found = {pod.spec["containers"][0]["image"] for pod in pods(render_chart({"images": images}))}
    assert found == {f"localhost:5000/saturate-{name}@{digest}" for name in ("front", "gpu")}


def test_existing_claims_take_the_place_of_new_ones() -> None:
    documents = render_chart(
        {"cache": {"claim": "weights"}, "batchGroup": {"enabled": True, "claim": "rows"}}
    )
    assert of_kind(documents, "PersistentVolumeClaim") == []
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods(documents)
        for volume in pod.spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {"weights", "rows"}


def test_volumes_have_the_class_and_the_size_of_the_values() -> None:
    chosen = {"storageClass": "nfs", "size": "1Ti"}
    values = {
        "cache": chosen,
        "redis": {"enabled": True, **chosen},
        "batchGroup": {"enabled": True, **chosen},
    }
    documents = render_chart(values)
    (redis,) = of_kind(documents, "StatefulSet")
    claims = [*of_kind(documents, "PersistentVolumeClaim"), *redis["spec"]["volumeClaimTemplates"]]
    assert len(claims) == 3
    for claim in claims:
        assert claim["spec"]["storageClassName"] == "nfs"
        assert claim["spec"]["resources"]["requests"]["storage"] == "1Ti"


def test_policies_name_the_namespaces_of_the_values_or_are_left_out() -> None:
    everything = merged(*OPTIONS.values())
    names = {"kuberay": "operators", "monitoring": "metrics"}
    pods = {"podNamespace": "front-door", "podLabels": {"app": "envoy"}}
    values = merged(everything, {"networkPolicy": {"namespaces": names}, "httpRoute": {"gateway": pods}})
    text = yaml.safe_dump(of_kind(render_chart(values), "NetworkPolicy"))
    assert all(f"metadata.name: {name}" in text for name in [*names.values(), "front-door"])
    assert not any(f"metadata.name: {name}" in text for name in ("kuberay", "gateway", "monitoring"))
    assert "app: envoy" in text
    assert "gateway-name: gateway\n" not in text
    assert of_kind(render_chart(everything | {"networkPolicy": {"enabled": False}}), "NetworkPolicy") == []


def test_nodes_and_numbers_of_the_groups_are_those_of_the_values() -> None:
    taint = {"key": "gpus", "operator": "Exists"}
    values = {
        "front": {"minReplicas": 2, "maxReplicas": 9, "nodeSelector": {"pool": "cpu"}},
        "gpu": {"minReplicas": 1, "maxReplicas": 3, "nodeSelector": {"pool": "gpu"}, "tolerations": [taint]},
    }
    front, gpu = service(values)["rayClusterConfig"]["workerGroupSpecs"]
    assert [front[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 9]
    assert [gpu[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [1, 1, 3]
    assert front["template"]["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert gpu["template"]["spec"]["tolerations"] == [taint]


# A config of one's own

Config = dict[str, Any]


def own(change: Callable[[Config], object], name: str = "qwen2.5-7b-l4") -> dict[str, Any]:
    """Return values with a changed config."""
    config = yaml.safe_load((REPOSITORY / f"configs/{name}.yaml").read_text())
    change(config)
    return {"configText": yaml.safe_dump(config)}


def engine(config: Config) -> Any:
    """Return the deployment of the model in a config."""
    (found,) = [one for one in config["applications"][0]["deployments"] if one["name"].startswith("Engine:")]
    return found


def replicas(low: int, high: int) -> Callable[[Config], None]:
    """Return a change of an Engine's replicas."""
    return lambda config: engine(config)["autoscaling_config"].update(min_replicas=low, max_replicas=high)


@needs_crds
@pytest.mark.parametrize(
    "change",
    [
        replicas(3, 7),
        lambda config: engine(config)["ray_actor_options"].update(num_gpus=2, num_cpus=8),
        lambda config: (engine(config).pop("autoscaling_config"), engine(config).update(num_replicas=5)),
    ],
    ids=["replicas", "gpus", "fixed"],
)
def test_the_groups_follow_a_config_of_one_s_own(change: Callable[[Config], object]) -> None:
    assert checks.problems(render_chart(own(change))) == []


def two_models(config: Config) -> None:
    deployments = config["applications"][0]["deployments"]
    deployments.append(
        engine(config) | {"name": "Engine:other", "ray_actor_options": {"num_gpus": 4, "num_cpus": 8}}
    )


WRONG: list[tuple[str, dict[str, Any]]] = [
    # The schema.
    ("'image'", {"image": {}}),
    ("'/images'", {"images": {"tga": "1"}}),
    ("'/images/tag'", {"images": {"tag": "a tag"}}),
    ("'/images/registry'", {"images": {"registry": "https://registry.example.com/team"}}),
    ("'/config'", {"config": "qwen"}),
    ("'/name'", {"name": "Saturate"}),
    ("'/front/cores'", {"front": {"cores": "2"}}),
    ("'/front'", {"front": {"resources": None}}),
    ("'/gpu/minReplicas'", {"gpu": {"minReplicas": "all"}}),
    ("'/gpu/resources'", {"gpu": {"resources": {"request": {}}}}),
    ("'/upgrade/type'", {"upgrade": {"type": "Rolling"}}),
    ("'/redis/enabled'", {"redis": {"enabled": "yes"}}),
    ("'/networkPolicy/namespaces'", {"networkPolicy": {"namespaces": {"prometheus": "x"}}}),
    # Combinations.
    ("gpu.maxReplicas: 1, but the replicas of config qwen2.5-7b-l4 need 2", {"gpu": {"maxReplicas": 1}}),
    ("front.maxReplicas: 3", {"front": {"maxReplicas": 3}}),
    ("gpu.minReplicas: 5", {"gpu": {"minReplicas": 5}}),
    ("images.front: saturate-front has no engine", {"config": "demo-cluster"}),
    ("cache.claim", {"cache": {"claim": "weights", "perPod": True}}),
    # Configs.
    ("configText: this is not YAML", {"configText": "a: [b"}),
    ("configText: applications", {"configText": "http_options: {}"}),
    ("configText: applications", own(lambda config: config["applications"].append({}))),
    ("http_options.host", own(lambda config: config["http_options"].update(host="127.0.0.1"))),
    ("http_options.port", own(lambda config: config["http_options"].update(port=9000))),
    (
        "num_replicas",
        own(
            lambda config: (
                engine(config).pop("autoscaling_config"),
                engine(config).update(num_replicas="auto"),
            )
        ),
    ),
    ("Engine:other", own(two_models)),
    ("gpu.maxReplicas: 2", own(replicas(1, 3)) | {"gpu": {"maxReplicas": 2}}),
    ("apiKeys.secret", own(lambda config: None) | OPTIONS["api-keys"]),
    (
        "apiKeys.secret",
        own(
            lambda config: config["applications"][0]["args"].update(
                access={"keys_file": "/etc/saturate/keys.yaml"}
            )
        ),
    ),
]


@pytest.mark.parametrize(
    ("named", "values"), WRONG, ids=[f"{i}-{named}" for i, (named, _) in enumerate(WRONG)]
)
def test_a_wrong_value_is_an_error_that_names_it(named: str, values: dict[str, Any]) -> None:
    with pytest.raises(ChartError) as raised:
        render_chart(values)
    assert named in str(raised.value)


@pytest.mark.parametrize("release", ["1st", "a" * 48])
def test_a_release_whose_name_kuberay_refuses_is_an_error(release: str) -> None:
    with pytest.raises(ChartError, match="name: must begin with a letter"):
        render_chart(release=release)
