"""Requests that follow vLLM's own schema, with values in them that are meant to do harm.

All depends on a seed alone: a request that was found can be made again.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from serve_app.api.protocol import JSON, GenerateRequest, ProcessRequest
from tests.e2e.fuzz_requests import ROUTES, TELLING, FuzzRequest, bounded

OWN: dict[str, type[BaseModel]] = {"/generate": GenerateRequest, "/process": ProcessRequest}
MOVED = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize"}
"""Routes as `ROUTES` has them, and as vLLM's schema does."""

HOSTILE, LARGE = 0.3, 0.02
"""Share of values that are hostile, and of those that are large among them."""

DEEPEST = 6
"""Levels of the schema below which values are plain."""

_COSTLY = "^" + "(a|b|c|d|e){1,1000}" * 12 + "$"
_NESTED: JSON = {"type": "string", "pattern": _COSTLY}
for _ in range(20):
    _NESTED = {"type": "object", "properties": {"a": _NESTED, "b": {"type": "integer"}}, "required": ["a"]}
GRAMMARS: list[Any] = [
    {"type": "string", "pattern": _COSTLY},
    {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": _COSTLY} for i in range(40)}},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}},
    _NESTED,
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"allOf": [{"anyOf": [{"type": "string"}] * 50}] * 20},
    {"type": "string", "minLength": 10**9},
    {"type": "string", "maxLength": 10**7},
    {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
    {"enum": [str(i) * 20 for i in range(2000)]},
    {"pattern": "(" * 500},
    {"type": "string", "pattern": "(a+)+" * 20 + "$"},
]
PATTERNS = [_COSTLY, "(a+)+$", "((((a{1,99}){1,99}){1,99}){1,99})", "(?=a)b", "[^" + "a-z" * 500 + "]*"]
EBNF = [
    "root ::= " + '("a" | "b")? ' * 500,
    "root ::= a\n" + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(30)),
    'start: "a"' + " | start start" * 50,
]
_LONG: JSON = {"type": "array", "minItems": 10**6}
FAIL_IN_ENGINE: list[tuple[str, JSON]] = [
    ("/v1/completions", {"structured_outputs": {"regex": "\\"}}),
    ("/v1/responses", {"structured_outputs": {"grammar": "root ::= root"}}),
    (
        "/v1/completions",
        {"structured_outputs": {"json": {"type": "string", "pattern": "[\\u0000-\\U0010ffff]{1000}{1000}"}}},
    ),
    ("/v1/chat/completions", {"structured_outputs": {"json": _LONG | {"items": _LONG}}}),
    ("/v1/chat/completions/batch", {"top_k": 2**64}),
    ("/v1/chat/completions", {"structured_outputs": {"json_object": False}}),
]
"""Values that vLLM finds wrong only after the request was admitted."""

OUTPUTS = [
    *({"json": schema} for schema in GRAMMARS),
    *({"regex": pattern} for pattern in PATTERNS),
    *({"grammar": text} for text in EBNF),
    {"choice": ["x" * 1000] * 1000},
    {"json": GRAMMARS[0], "regex": "a", "choice": ["b"]},
    {"structural_tag": json.dumps({"structures": [], "triggers": ["a"] * 1000})},
]
FORMATS = [
    {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for schema in GRAMMARS
]
TOOLS = [
    [{"type": "function", "function": {"name": "add", "parameters": schema, "strict": True}}]
    for schema in GRAMMARS
]
MEDIA = [
    [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]
    for kind in ("image_url", "video_url", "audio_url")
    for url in ("http://127.0.0.1:1/", "http://169.254.169.254/", "file:///etc/passwd", "data:,", "x")
]
TARGETED: dict[str, list[Any]] = {
    "structured_outputs": OUTPUTS,
    "response_format": FORMATS,
    "text": [{"format": {"type": "json_schema", "name": "x", "schema": schema}} for schema in GRAMMARS],
    "tools": TOOLS,
    "messages": MEDIA,
    "n": [64, 128, 129, 10**9],
    "best_of": [64, 129],
    "logprobs": [0, 5, 20, 10**6],
    "top_logprobs": [20, 10**6],
    "prompt_logprobs": [0, 1, 20, 10**6],
    "stop": [["a" * 1000] * 64, ["a"] * 10_000, [""]],
    "bad_words": [["a" * 100] * 100, ["a"] * 5000],
    "logit_bias": [{str(i): 100 for i in range(5000)}, {"-1": 1}, {"0": 1e308}],
    "chat_template_kwargs": [{"a" * 1000: {}}, {"chat_template": "{% for a in range(10**9) %}{% endfor %}"}],
    "repetition_detection": [{"max_pattern_size": 10**9, "min_count": 2}],
}
"""Values that are costly in one field."""

LARGE_TEXTS = [
    '"' + "a" * 300_000 + '"',
    '"' + "\\u0000" * 50_000 + '"',
    '"' + "\\ud83d\\ude00" * 20_000 + '"',
    "[" + "1," * 50_000 + "1]",
    "[" + '"a",' * 9_000 + '"a"]',
    "[" + "[1]," * 9_000 + "[1]]",
    "[" + "{}," * 9_000 + "{}]",
    "[" + "{}," * 150_000 + "{}]",
    "[" + "1.5," * 200_000 + "null]",
    "{" + ",".join(f'"k{i}":1' for i in range(10_000)) + "}",
    "[" * 20_000 + "]" * 20_000,
    '{"a":' * 10_000 + "1" + "}" * 10_000,
]
ODD_TEXTS = [
    *("1e400", "-1e400", "1" + "0" * 4500, "NaN", "-Infinity", "-0", "1.5e-400", "0.1e1", "1E2"),
    *('"\\ud800"', '"\\u0000"', '"\\u202e"', "[" * 400 + "]" * 400, '{"a":' * 400 + "1" + "}" * 400),
    '{"a": 1, "a": 2}',
]
"""JSON that no Python value gives."""


class HostileRequests:
    """Makes requests.

    Args:
        openapi: The schema of vLLM's application.
        seed: Decides everything.
    """

    def __init__(self, openapi: JSON, seed: int) -> None:
        self._random = random.Random(seed)
        self._schemas = dict(openapi["components"]["schemas"])
        self._bodies: dict[str, JSON] = {}
        for path in ROUTES:
            if path in OWN:
                schema = OWN[path].model_json_schema()
                self._schemas |= schema.get("$defs", {})
            else:
                content = openapi["paths"][MOVED.get(path, path)]["post"]["requestBody"]["content"]
                schema = content["application/json"]["schema"]
            self._bodies[path] = schema
        self._texts: dict[str, str] = {}

    def __iter__(self) -> Iterator[FuzzRequest]:
        """Make requests without end."""
        paths = sorted(self._bodies)
        while True:
            path = self._random.choice(paths)
            yield FuzzRequest(path, self._body(path), (("content-type", b"application/json"),))

    def _body(self, path: str) -> bytes:
        body = dict(ROUTES[path][0])
        branch = self._branch(self._bodies[path])
        # A model by another name is no work for anybody; `FAIL_IN_ENGINE` has the values of `top_k`.
        fields = sorted(set(branch.get("properties", {})) - {"model", "top_k"})
        for name in self._random.sample(fields, min(len(fields), self._random.randint(1, 3))):
            body[name] = self._field(name, branch["properties"][name], 0)
        self._texts, texts = {}, self._texts
        text = json.dumps(bounded(body))
        for marker, raw in texts.items():
            text = text.replace(f'"{marker}"', raw)
        return text.encode(errors="surrogatepass")

    def _branch(self, schema: JSON) -> JSON:
        """Return one of the alternatives of a schema."""
        while True:
            if "$ref" in schema:
                schema = self._schemas[schema["$ref"].rpartition("/")[2]]
            elif kinds := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
                schema = self._random.choice(kinds)
            else:
                return schema

    def _field(self, name: str, schema: JSON, level: int) -> Any:
        if name in TARGETED and self._random.random() < HOSTILE:
            return self._random.choice(TARGETED[name])
        return self._value(schema, level)

    def _value(self, schema: JSON, level: int) -> Any:
        draw = self._random
        if draw.random() < HOSTILE:
            if draw.random() < LARGE:
                return self._raw(draw.choice(LARGE_TEXTS))
            return draw.choice([*TELLING, self._raw(draw.choice(ODD_TEXTS))])
        schema = self._branch(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return draw.choice(schema["enum"])
        kind = "null" if level > DEEPEST else schema.get("type")
        if kind == "object":
            fields = schema.get("properties", {})
            needed = schema.get("required", [])
            some = [name for name in fields if name in needed or draw.random() < 0.3]
            return {name: self._field(name, fields[name], level + 1) for name in some}
        if kind == "array":
            return [self._value(schema.get("items", {}), level + 1) for _ in range(draw.randint(0, 3))]
        plain: dict[str, list[Any]] = {
            "string": ["a", "What is 1+1?", "auto", "", "user", "text"],
            "integer": [0, 1, 2, 7, -1],
            "number": [0.0, 0.5, 1.0, 2.0, -1.0],
            "boolean": [True, False],
        }
        return draw.choice(plain.get(str(kind), [None]))

    def _raw(self, text: str) -> str:
        """Return a marker, in place of which the text is written."""
        marker = f"@raw{len(self._texts)}@"
        self._texts[marker] = text
        return marker
