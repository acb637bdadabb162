"""The parsers of each family, in the config that is generated for a model."""

import pytest

from tests.serve_app.models.doubles import GB, H100, LLAMA_8B, Model, machine, served


@pytest.mark.parametrize(
    ("model_type", "name", "tools", "reasoning"),
    [
        ("qwen2", "Qwen/Qwen2.5-7B-Instruct", "hermes", None),
        ("qwen2", "Qwen/QwQ-32B", "hermes", "deepseek_r1"),
        ("qwen2", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", None, "deepseek_r1"),
        ("qwen3", "Qwen/Qwen3-8B", "hermes", "qwen3"),
        ("qwen3_moe", "Qwen/Qwen3-30B-A3B-Instruct-2507", "hermes", None),
        ("qwen3_moe", "Qwen/Qwen3-30B-A3B-Thinking-2507", "hermes", "qwen3"),
        ("qwen3_moe", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder", None),
        ("llama", "meta-llama/Llama-3.1-8B-Instruct", "llama3_json", None),
        ("llama", "meta-llama/Meta-Llama-3-8B-Instruct", "llama3_json", None),
        ("llama", "meta-llama/Llama-2-7b-chat-hf", None, None),
        ("llama", "NousResearch/Hermes-3-Llama-3.1-8B", "hermes", None),
        ("llama", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B", None, "deepseek_r1"),
        ("llama4", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_pythonic", None),
        ("mistral", "mistralai/Mistral-7B-Instruct-v0.3", "mistral", None),
        ("mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1", "mistral", None),
        ("mistral", "mistralai/Magistral-Small-2506", "mistral", "mistral"),
        ("deepseek_v3", "deepseek-ai/DeepSeek-V3-0324", "deepseek_v3", None),
        ("deepseek_v3", "deepseek-ai/DeepSeek-V3.1", "deepseek_v31", "deepseek_v3"),
        ("deepseek_v3", "deepseek-ai/DeepSeek-R1-0528", "deepseek_v3", "deepseek_r1"),
        ("deepseek_v32", "deepseek-ai/DeepSeek-V3.2", "deepseek_v32", "deepseek_v3"),
        ("gpt_oss", "openai/gpt-oss-120b", "openai", "openai_gptoss"),
        ("gemma2", "google/gemma-2-9b-it", None, None),
        ("phi3", "microsoft/Phi-4-mini-instruct", "phi4_mini_json", None),
        ("granite", "ibm-granite/granite-3.1-8b-instruct", "granite", None),
        ("granitemoehybrid", "ibm-granite/granite-4.0-h-small", "granite4", None),
        ("glm4_moe", "zai-org/GLM-4.6", "glm45", "glm45"),
        ("glm4_moe", "zai-org/GLM-4.7", "glm47", "glm47"),
        ("kimi_k2", "moonshotai/Kimi-K2-Instruct", "kimi_k2", None),
        ("new", "org/new-model", None, None),
    ],
)
def test_a_model_has_the_parsers_of_its_family_and_room_for_its_reasoning(
    model_type: str, name: str, tools: str | None, reasoning: str | None
) -> None:
    found = served(Model(name, LLAMA_8B | {"model_type": model_type}, GB), machine(H100))
    engine = found.engine
    assert (engine.get("tool_call_parser"), engine.get("reasoning_parser")) == (tools, reasoning)
    assert engine.get("enable_auto_tool_choice") is (True if tools else None)
    assert found.model.sampling.max_tokens == (4096 if reasoning else 512)
