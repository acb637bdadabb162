"""The network policies let through what is needed, and a change of any of their parts is found."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s import checks, reach
from tests.k8s.pods import of_kind
from tests.k8s.rendering import COMPONENTS, K8S, OVERLAYS, Document, render, with_components
from tests.k8s.schemas import needs_crds

OPTIONS = sorted({path.name for path in COMPONENTS} - {"gpu", "cache-per-pod"})


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """An overlay with every option, and the job that has pods of its own."""
    folder = tmp_path_factory.mktemp("full")
    overlay = with_components(K8S / "overlays" / "qwen2.5-7b-l4", OPTIONS, folder)
    return [*render(overlay), *render(K8S / "jobs" / "http")]


def test_pods_reach_what_they_need_and_nothing_else(documents: list[Document]) -> None:
    assert list(reach.problems(documents)) == []


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
@pytest.mark.parametrize("option", ["", *OPTIONS])
def test_each_option_brings_the_rules_that_it_needs(overlay: Path, option: str, tmp_path: Path) -> None:
    documents = render(with_components(overlay, [option] if option else [], tmp_path))
    assert list(reach.problems([*documents, *render(K8S / "jobs" / "http")])) == []


ANYBODY: list[dict[str, Any]] = [
    {"podSelector": {}},
    {"namespaceSelector": {}},
    {"ipBlock": {"cidr": "0.0.0.0/0"}},
]


def _selector(found: dict[str, Any]) -> Iterator[str]:
    """Weaken a selector in every way; it is as before after each."""
    for name, value in list(found.get("matchLabels", {}).items()):
        del found["matchLabels"][name]
        yield f"matchLabels without {name}"
        found["matchLabels"][name] = "another"
        yield f"another {name}"
        found["matchLabels"][name] = value
    for index, rule in enumerate(list(found.get("matchExpressions", []))):
        del found["matchExpressions"][index]
        yield f"matchExpressions without {rule['key']}"
        found["matchExpressions"].insert(index, rule)
        for number, value in enumerate(list(rule.get("values", []))):
            rule["values"][number] = "another"
            yield f"another value than {value}"
            rule["values"][number] = value


def _ports(rule: dict[str, Any]) -> Iterator[str]:
    ports = rule.get("ports")
    if ports is None:
        rule["ports"] = [{"port": 8000}]
        yield "one port only"
        del rule["ports"]
        return
    del rule["ports"]
    yield "no ports"
    rule["ports"] = ports
    for index, port in enumerate(list(ports)):
        if len(ports) > 1:
            del ports[index]
            yield f"without port {port['port']}"
            ports.insert(index, port)
        # The ports beside it may be open or not; this one isn't tried, so that the right one is missed.
        ports[index] = port | {"port": 1, "endPort": 1}
        yield f"another port than {port['port']}"
        ports[index] = port | {"port": 1, "endPort": 65535}
        yield f"all ports instead of {port['port']}"
        ports[index] = port


def _weaken(spec: dict[str, Any]) -> Iterator[str]:
    """Change a policy in each of its parts; it is as before after each change."""
    for change in _selector(spec["podSelector"]):
        yield f"podSelector: {change}"
    for kind in list(spec["policyTypes"]):
        spec["policyTypes"].remove(kind)
        yield f"policyTypes without {kind}"
        spec["policyTypes"].append(kind)
    for key, peers in (("ingress", "from"), ("egress", "to")):
        for index, rule in enumerate(list(spec.get(key, []))):
            path = f"{key}[{index}]"
            del spec[key][index]
            yield f"{path} is missing"
            spec[key].insert(index, rule)
            found = rule.pop(peers)
            yield f"{path} without {peers}"
            rule[peers] = found
            for peer in ANYBODY:
                found.append(peer)
                yield f"{path}.{peers} with {peer}"
                found.pop()
            for number, peer in enumerate(list(found)):
                for name, selector in list(peer.items()):
                    here = f"{path}.{peers}[{number}].{name}"
                    del peer[name]
                    yield f"{here} is missing"
                    # Two elements in place of one: pods of all namespaces, or all pods of a namespace.
                    found.append({name: selector})
                    yield f"{here} in an element of its own"
                    found.pop()
                    peer[name] = selector
                    for change in _selector(selector):
                        yield f"{here}: {change}"
            for change in _ports(rule):
                yield f"{path}: {change}"


def test_a_change_of_any_part_of_a_policy_is_found(documents: list[Document]) -> None:
    documents = copy.deepcopy(documents)
    tried, missed = 0, []
    for policy in of_kind(documents, "NetworkPolicy"):
        before = yaml.safe_dump(policy)
        for change in _weaken(policy["spec"]):
            tried += 1
            if next(reach.problems(documents), None) is None:
                missed.append(f"{policy['metadata']['name']}: {change}")
        assert yaml.safe_load(before) == policy
    assert missed == []
    assert tried > 150


def test_a_pod_that_no_policy_selects_is_found(documents: list[Document]) -> None:
    documents = copy.deepcopy(documents)
    (service,) = of_kind(documents, "RayService")
    (job,) = of_kind(documents, "RayJob")
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for group in (*groups, job["spec"]["rayClusterSpec"]["headGroupSpec"]):
        labels = group["template"]["metadata"]["labels"]
        for name, value in list(labels.items()):
            del labels[name]
            assert list(reach.problems(documents)), (group.get("groupName", "the job"), name)
            labels[name] = value
    assert list(reach.problems(documents)) == []


@needs_crds
def test_the_checks_of_the_manifests_follow_the_connections(documents: list[Document]) -> None:
    weaker = copy.deepcopy(documents)
    (policy,) = [d for d in of_kind(weaker, "NetworkPolicy") if d["metadata"]["name"] == "saturate"]
    del policy["spec"]["ingress"][1]["from"][0]["namespaceSelector"]
    policy["spec"]["ingress"][1]["from"][0]["podSelector"] = {
        "matchLabels": {"app.kubernetes.io/name": "grafana"}
    }
    found = checks.problems(weaker)
    assert "NetworkPolicy: grafana in team reaches TCP port 8265 of head in team (Ingress)" in found
    assert "NetworkPolicy: operator in kuberay doesn't reach TCP port 8265 of head in team (Ingress)" in found
