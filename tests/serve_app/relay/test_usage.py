from serve_app.relay.usage import MAX_PROMPTS, PromptUsage, RequestUsage


def test_the_usage_of_a_request_is_that_of_its_prompts() -> None:
    usage = RequestUsage()
    usage.add(PromptUsage(10.0, 10.5, 12.0, prompt_tokens=3, output_tokens=4))
    usage.add(PromptUsage(9.0, 11.0, 13.0, prompt_tokens=5, output_tokens=6, cached_tokens=4))
    assert (usage.prompt_tokens, usage.output_tokens) == (8, 10)
    assert usage.cached_tokens == 4
    assert usage.wait_s == 2.0
    assert usage.engine_s == 4.0


def test_the_totals_cross_the_relay() -> None:
    usage = RequestUsage(3, 4, 0.5, 1.5, 2)
    assert RequestUsage.unpack(usage.pack()) == usage


def test_only_the_first_prompts_are_kept_one_by_one() -> None:
    usage = RequestUsage()
    for _ in range(MAX_PROMPTS + 1):
        usage.add(PromptUsage(0.0, 0.0, 1.0, 1, 1))
    assert len(usage.prompts) == MAX_PROMPTS
    assert usage.prompt_tokens == MAX_PROMPTS + 1


def test_a_total_above_the_largest_that_crosses_the_relay_is_cut_off() -> None:
    # A function may say what it likes of the cost of its records.
    usage = RequestUsage(prompt_tokens=1 << 40, output_tokens=3)
    assert RequestUsage.unpack(usage.pack()) == RequestUsage(prompt_tokens=(1 << 32) - 1, output_tokens=3)
