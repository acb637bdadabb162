"""Parsers of tool calls and reasoning, by model family."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Parsers:
    """vLLM's parsers for a model.

    Attributes:
        tools: `tool_call_parser`; None: no known format of tool calls.
        reasoning: `reasoning_parser`; None: no reasoning, or no separate reasoning.
    """

    tools: str | None = None
    reasoning: str | None = None


NONE = Parsers()


@dataclass(frozen=True)
class _Rule:
    """Models and their parsers.

    Attributes:
        name: Regular expression for the name of the model in lower case; empty: any name.
        types: Regular expression that matches all of `model_type` in config.json; empty: any type.
        parsers: The parsers.
    """

    name: str
    types: str
    parsers: Parsers


RULES = (
    # Fine-tuned models with another format than their family.
    _Rule(r"r1-distill|qwq-32b-preview", "", Parsers(reasoning="deepseek_r1")),
    _Rule(r"hermes-[234]", "", Parsers("hermes")),
    _Rule(r"xlam", "", Parsers("xlam")),
    _Rule(r"functiongemma", "", Parsers("functiongemma")),
    _Rule(r"qwq", r"qwen2", Parsers("hermes", "deepseek_r1")),
    # Qwen. The later models come in an "Instruct" form without reasoning.
    _Rule("", r"qwen3_5(_moe)?(_text)?", Parsers("qwen3_coder", "qwen3")),
    _Rule(r"coder", r"qwen3(_moe|_next)?", Parsers("qwen3_coder")),
    _Rule(r"instruct", r"qwen3(_moe|_next|_vl|_vl_moe)?", Parsers("hermes")),
    _Rule("", r"qwen3(_moe|_next|_vl|_vl_moe)?", Parsers("hermes", "qwen3")),
    _Rule("", r"qwen2(_moe|_vl|_5_vl)?", Parsers("hermes")),
    # Llama. Versions before 3 don't support tools.
    _Rule("", r"llama4(_text)?", Parsers("llama4_pythonic")),
    _Rule(r"llama-?3", r"llama|mllama", Parsers("llama3_json")),
    # Mistral.
    _Rule(r"magistral", r"mistral.*", Parsers("mistral", "mistral")),
    _Rule("", r"mistral|mistral3|ministral3?|mixtral|pixtral", Parsers("mistral")),
    # DeepSeek.
    _Rule("", r"deepseek_v4", Parsers("deepseek_v4", "deepseek_v4")),
    _Rule(r"v3\.2", r"deepseek_v3.*", Parsers("deepseek_v32", "deepseek_v3")),
    _Rule("", r"deepseek_v32", Parsers("deepseek_v32", "deepseek_v3")),
    _Rule(r"v3\.1", r"deepseek_v3", Parsers("deepseek_v31", "deepseek_v3")),
    _Rule(r"r1", r"deepseek_v3", Parsers("deepseek_v3", "deepseek_r1")),
    _Rule("", r"deepseek_v3", Parsers("deepseek_v3")),
    _Rule(r"kimi-k2.*thinking", "", Parsers("kimi_k2", "kimi_k2")),
    _Rule("", r"kimi_k2", Parsers("kimi_k2")),
    _Rule("", r"kimi_k25", Parsers("kimi_k2", "kimi_k2")),
    # Others.
    _Rule("", r"gpt_oss", Parsers("openai", "openai_gptoss")),
    _Rule("", r"gemma4.*", Parsers("gemma4", "gemma4")),
    _Rule(r"phi-?4-mini-instruct", r"phi3", Parsers("phi4_mini_json")),
    _Rule(r"phi-?4(-mini)?(-flash)?-reasoning", r"phi3|phi4.*", Parsers(reasoning="deepseek_r1")),
    _Rule(r"granite-20b-func", "", Parsers("granite-20b-fc")),
    _Rule("", r"granitemoehybrid", Parsers("granite4")),
    _Rule(r"granite-3\.[23]", r"granite", Parsers("granite", "granite")),
    _Rule("", r"granite|granitemoe(shared)?", Parsers("granite")),
    _Rule(r"4\.7", r"glm4_moe", Parsers("glm47", "glm47")),
    _Rule("", r"glm4_moe_lite|glm_moe_dsa", Parsers("glm47", "glm47")),
    _Rule("", r"glm4_moe|glm4v_moe|glm46v", Parsers("glm45", "glm45")),
    _Rule("", r"minimax_m2", Parsers("minimax_m2", "minimax_m2")),
    _Rule("", r"seed_oss", Parsers("seed_oss", "seed_oss")),
    _Rule("", r"hunyuan_v1_moe", Parsers("hunyuan_a13b", "hunyuan_a13b")),
    _Rule(r"thinking", r"ernie4_5(_moe)?", Parsers("ernie45", "ernie45")),
    _Rule("", r"step3_vl|step3_text", Parsers("step3", "step3")),
    _Rule("", r"step3p5", Parsers("step3p5", "step3p5")),
    _Rule(r"think", r"olmo3", Parsers("olmo3", "olmo3")),
    _Rule("", r"olmo3", Parsers("olmo3")),
    _Rule(r"nemotron.*3", r"nemotron_h", Parsers("qwen3_coder", "nemotron_v3")),
    _Rule("", r"internlm2", Parsers("internlm")),
    _Rule("", r"jamba", Parsers("jamba")),
    _Rule("", r"lfm2(_moe)?", Parsers("lfm2")),
    _Rule("", r"apertus", Parsers("apertus")),
    _Rule("", r"mimo", Parsers("mimo", "mimo")),
)
"""The first matching rule applies, so exceptions are above the rule of their family."""


def parsers_of(model_type: str, name: str) -> Parsers:
    """Return the parsers of a model.

    Args:
        model_type: As in config.json.
        name: Hugging Face id or directory. Some families differ only in their names.
    """
    for rule in RULES:
        named = re.search(rule.name, name.lower())
        if named and (not rule.types or re.fullmatch(rule.types, model_type)):
            return rule.parsers
    return NONE
