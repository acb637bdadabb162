"""Every overlay and job renders, is what Kubernetes, KubeRay and Serve take, and agrees with the code."""

from pathlib import Path

import pytest
import yaml

from serve_app.settings.environment import OFFLINE
from tests.k8s.checks import problems
from tests.k8s.rendering import (
    COMPONENTS,
    JOBS,
    K8S,
    OVERLAYS,
    REPOSITORY,
    render,
    renderers,
    with_components,
)
from tests.k8s.schemas import needs_crds

CONFIGS = REPOSITORY / "configs"
CARRIED = {
    "demo-cpu": "demo-cluster.yaml",
    "qwen2.5-7b-l4": "qwen2.5-7b-l4.yaml",
    "llama3-8b-a100": "llama3-8b-a100.yaml",
    "llama3-70b-4xa100": "llama3-70b-4xa100.yaml",
    "llama3-405b-16xh100": "llama3-405b-16xh100.yaml",
}
"""The config of each overlay."""

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS, ids=[path.name for path in OVERLAYS])
every_folder = pytest.mark.parametrize("folder", [*OVERLAYS, *JOBS], ids=lambda path: path.name)


def test_there_is_an_overlay_for_each_config_of_a_cluster() -> None:
    assert {path.name for path in OVERLAYS} == set(CARRIED)


@needs_crds
@every_folder
def test_nothing_is_wrong_with_it(folder: Path) -> None:
    assert problems(render(folder)) == []


@needs_crds
@pytest.mark.parametrize(
    "overlay", [path for path in OVERLAYS if path.name != "demo-cpu"], ids=lambda p: p.name
)
def test_nothing_is_wrong_with_it_and_every_option(overlay: Path, tmp_path: Path) -> None:
    options = sorted({path.name for path in COMPONENTS} - {"gpu"})
    documents = render(with_components(overlay, options, tmp_path))
    assert problems(documents) == []
    (service,) = [document for document in documents if document["kind"] == "RayService"]
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["cpu", "gpu", "batch"]
    assert service["spec"]["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade"
    assert "saturate-models" not in {document["metadata"]["name"] for document in documents}


@needs_crds
def test_nothing_is_wrong_with_the_demo_and_the_options_that_it_names(tmp_path: Path) -> None:
    overlay = K8S / "overlays" / "demo-cpu"
    options = ["redis", "batch-group", "api-keys", "http-route"]
    assert problems(render(with_components(overlay, options, tmp_path))) == []


@every_overlay
def test_it_carries_the_config_word_for_word(overlay: Path) -> None:
    (service,) = [document for document in render(overlay) if document["kind"] == "RayService"]
    assert service["spec"]["serveConfigV2"] == (CONFIGS / CARRIED[overlay.name]).read_text()


@every_overlay
def test_the_configs_themselves_are_not_deployed(overlay: Path) -> None:
    assert "ConfigMap" not in {document["kind"] for document in render(overlay)}


@every_folder
def test_every_kustomize_here_renders_the_same(folder: Path) -> None:
    first, *others = [render(folder, command) for command in renderers()]
    for other in others:
        assert other == first


def test_the_demo_of_a_cluster_is_the_local_demo_for_several_nodes() -> None:
    local = yaml.safe_load((CONFIGS / "local.yaml").read_text())
    cluster = yaml.safe_load((CONFIGS / "demo-cluster.yaml").read_text())
    assert cluster["http_options"].pop("host") == "0.0.0.0"
    assert local["http_options"].pop("host") == "127.0.0.1"
    # On one machine the command knows that no model needs a download.
    (app,) = cluster["applications"]
    assert app.pop("runtime_env") == {"env_vars": {OFFLINE.name: OFFLINE.value}}
    # On a cluster, the environment of the pods says which of them take an Ingress replica.
    (front,) = [d for d in local["applications"][0]["deployments"] if d["name"] == "Ingress"]
    assert front.pop("ray_actor_options") == {"num_cpus": 0.5}
    # A pod's disk ends with the pod.
    assert local["applications"][0]["args"].pop("batches")
    assert cluster == local


@pytest.mark.parametrize("path", sorted(K8S.rglob("*.yaml")), ids=lambda path: str(path.relative_to(K8S)))
def test_every_manifest_says_what_it_is(path: Path) -> None:
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("order", [["api-keys", "batch-group"], ["batch-group", "api-keys"]], ids=" ".join)
def test_batch_pods_have_no_api_keys(order: list[str], tmp_path: Path) -> None:
    documents = render(with_components(OVERLAYS[0], order, tmp_path))
    (service,) = [document for document in documents if document["kind"] == "RayService"]
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    having = [group["groupName"] for group in groups if "api-keys" in yaml.safe_dump(group)]
    assert having == ["cpu"]
