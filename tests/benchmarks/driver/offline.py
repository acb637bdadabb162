"""`vllm.LLM.generate` on the rows of a file, once for each line that comes in; nothing around it."""

import json
import sys
import time


def main() -> None:
    """Load the model, say so, then answer each request for a run with the seconds that it took.

    A request is the name of a file, as JSON.
    """
    from vllm import LLM, SamplingParams

    arguments = json.loads(sys.argv[1])
    # vLLM logs to standard output; what the benchmark reads goes by another way.
    out = open(sys.argv[2], "w", buffering=1)  # noqa: SIM115
    llm = LLM(**arguments)
    params = SamplingParams(temperature=0, max_tokens=16)
    out.write("ready\n")
    for line in sys.stdin:
        prompts = [json.loads(row)["prompt"] for row in open(json.loads(line))]  # noqa: SIM115
        started = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - started
        out.write(json.dumps([seconds, [output.outputs[0].text for output in outputs]]) + "\n")


if __name__ == "__main__":
    main()
