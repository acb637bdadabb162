"""`vllm.LLM.generate` without a service, on the rows of a file for each line of standard input."""

import json
import sys
import time


def main() -> None:
    """Load the model, write "ready", then run each file that is named on standard input, as JSON.

    The answer to a name has the seconds of the run, and its results.
    """
    from vllm import LLM, SamplingParams

    arguments = json.loads(sys.argv[1])
    # vLLM logs to standard output, so that answers go elsewhere.
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
