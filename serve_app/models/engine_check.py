"""Check engine options against the installed vLLM, before anything starts."""

from serve_app.api.validation import suggestion
from serve_app.models import installed_vllm
from serve_app.settings.models import FunctionSettings, LLMSettings
from serve_app.settings.serve_options import DONE, refusal


def check_engine(model: LLMSettings | FunctionSettings) -> None:
    """Check options that an engine would refuse minutes later; without vLLM this does nothing.

    Raises:
        ValueError: The name or the value of an option is wrong; the message names both.
    """
    options = installed_vllm.options()
    if not isinstance(model, LLMSettings) or not options:
        return
    engine, place = model.engine, f"models[{model.id}].engine"
    for name, value in engine.extra.items():
        option = options.get(name)
        if option is None or (option.server and name not in DONE):
            known = suggestion(name, (one for one in options if refusal(one) is None))
            raise ValueError(f"{place}.extra.{name}: this vLLM has no such option{known}")
        if mistake := option.mistake(value):
            raise ValueError(f"{place}.extra.{name}: {mistake}")
    if engine.enable_auto_tool_choice and not engine.tool_call_parser:
        raise ValueError(f"{place}.enable_auto_tool_choice: needs tool_call_parser too")
    if engine.extra.get("enable_log_outputs") and not engine.extra.get("enable_log_requests"):
        raise ValueError(f"{place}.extra.enable_log_outputs: needs enable_log_requests too")
    for name, plugin, parsers in (
        ("tool_call_parser", "tool_parser_plugin", installed_vllm.parsers("tool_parsers")),
        ("reasoning_parser", "reasoning_parser_plugin", installed_vllm.parsers("reasoning")),
    ):
        chosen = getattr(engine, name)
        if chosen and parsers and chosen not in parsers and not engine.extra.get(plugin):
            raise ValueError(
                f"{place}.{name}: this vLLM has no parser {chosen!r}{suggestion(chosen, sorted(parsers))}"
            )
