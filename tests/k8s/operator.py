"""A Ray cluster of pods, brought up and talked to as KubeRay does it."""

import json
from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import Any

from tests.k8s.machine import Machine, Running
from tests.k8s.pods import cluster_spec, groups
from tests.k8s.rendering import Document
from tests.progress import wait_until

END_S = 240.0
"""Seconds that a pod has to end."""

APPLICATIONS = "/api/serve/applications/"


class RayCluster:
    """The cluster of a RayService or RayJob.

    Args:
        machine: Where its pods run.
        document: The rendered document.
        secrets: What the Secrets have that its environment names, by key.

    Attributes:
        head: Its head, which is ready.
        token: Ray's token, from the Secret that KubeRay makes; empty: Ray asks for none.
        workers: Its other pods.
    """

    def __init__(
        self, machine: Machine, document: Document, secrets: Mapping[str, str] | None = None
    ) -> None:
        self.machine = machine
        self.workers: list[Running] = []
        self._name = document["metadata"]["name"]
        options = cluster_spec(document).get("authOptions", {})
        self.token = token_hex(16) if options.get("mode") == "token" else ""
        self._groups = {name: group for name, _, group in groups(document)}
        self.head = machine.start(
            f"{self._name}-head-svc", self._groups["head"], secrets=secrets, token=self.token
        )
        # The head of a job has no probe of its own.
        if "readinessProbe" in self.head.container:
            self.wait_for(self.head)
        self._wait(lambda: self._ask("/api/version")[0] == 200)

    def add(self, group: str) -> Running:
        """Start a worker of a group; return when Ray runs on it."""
        name = f"{self._name}-{group}-{len(self.workers)}"
        pod = self.machine.start(name, self._groups[group], self.head.name, token=self.token)
        self.workers.append(pod)
        self.wait_for(pod, "livenessProbe")
        return pod

    def remove(self, pod: Running) -> float:
        """End a worker; return the seconds that it took."""
        self.workers.remove(pod)
        return pod.end(END_S)

    def wait_for(self, pod: Running, probe: str = "readinessProbe") -> None:
        """Wait until a probe of a pod succeeds."""
        self._wait(lambda: pod.probe(self.machine, probe))

    def call(self, path: str, body: object = None, method: str = "") -> Any:
        """Call the head's dashboard."""
        status, text = self._ask(path, body, method)
        assert status == 200, text
        return json.loads(text) if text else None

    def put(self, config: Mapping[str, Any]) -> None:
        """Have Serve take in a config."""
        self.call(APPLICATIONS, config, "PUT")

    def replicas(self) -> dict[str, str]:
        """Return the addresses of the replicas of all applications, by their ids, once all of them run."""
        seen: dict[str, Any] = {}

        def running() -> bool:
            seen.update(self.call(APPLICATIONS)["applications"])
            return all(application["status"] == "RUNNING" for application in seen.values())

        self._wait(running)
        return {
            replica["replica_id"]: replica["node_ip"]
            for application in seen.values()
            for deployment in application["deployments"].values()
            for replica in deployment["replicas"]
        }

    def run(self, job: Document) -> str:
        """Run the entrypoint of a RayJob; return what it printed."""
        spec = job["spec"]
        body = {"entrypoint": spec["entrypoint"]}
        if resources := spec.get("entrypointResources"):
            body["entrypoint_resources"] = json.loads(resources)
        path = f"/api/jobs/{self.call('/api/jobs/', body)['submission_id']}"
        self._wait(lambda: self.call(path)["status"] not in ("PENDING", "RUNNING"))
        logs: str = self.call(f"{path}/logs")["logs"]
        assert self.call(path)["status"] == "SUCCEEDED", logs
        return logs

    def _ask(self, path: str, body: object = None, method: str = "") -> tuple[int, str]:
        # As KubeRay sends it.
        headers = {"x-ray-authorization": f"Bearer {self.token}"} if self.token else {}
        return self.machine.ask(self._url(path), body, method, headers=headers)

    def _url(self, path: str) -> str:
        return f"http://{self.head.address}:8265{path}"

    def _wait(self, true: Callable[[], bool]) -> None:
        def is_so() -> bool:
            for pod in (self.head, *self.workers):
                assert pod.process.poll() is None, f"{pod.name} has ended:\n{pod.log.read_text()}"
            return true()

        wait_until(is_so, tell=self.head.log.read_text, every_s=0.5)
