"""The deployment handle, as a Ray job uses it."""

import httpx

from tests.e2e.service import Service

SCRIPT = """
import json, ray
from ray import serve
from serve_app.api.errors import RequestError

ray.init(address="auto", log_to_driver=False)
handle = serve.get_deployment_handle("Engine:demo", app_name="llm")
body = json.loads(input())
answer = handle.generate.remote(body).result(timeout_s=60)
try:
    handle.generate.remote({"prompts": []}).result(timeout_s=60)
except RequestError as error:
    refused = error.message
stats = handle.stats.remote().result(timeout_s=60)
print(json.dumps({"answer": answer, "refused": refused, "capacity": stats["batcher"]["capacity"]}))
"""


def test_a_script_gets_the_same_answers_as_http(service: Service, http: httpx.Client) -> None:
    body = {"prompts": ["What is 47+28?", "What is 12-40?"], "task_id": "t", "details": True}
    result = service.run_python(SCRIPT, body)
    assert result["answer"] == http.post("/generate", json=body).json()
    assert result["answer"]["results"] == ["75", "-28"]
    assert result["refused"] == "No prompts provided"
    assert result["capacity"] > 0
