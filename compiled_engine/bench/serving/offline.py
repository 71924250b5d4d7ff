"""The engine without its server, in a process of its own: a JSON task on stdin, JSON lines on stdout.

Task: {"options": engine options, "workload": fields of `HttpWorkload`, or null to start only, "repeats": number}.
Lines: {"ready": true} once requests could be taken, then what `_measure` gives.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any


def run(task: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The result; {} without a workload."""
    from compiled_engine.llm import LLM

    with LLM(**task["options"], progress=False) as llm:
        say({"ready": True})
        return {} if task["workload"] is None else _measure(llm, task["workload"], task["repeats"])


def _measure(llm: Any, workload: dict[str, Any], repeats: int) -> dict[str, Any]:
    """output_throughput: output tokens a second of each repeat. mixed_step_ms. Where, and with what model."""
    from compiled_engine.bench.engine_steps import mixed_step_ms
    from compiled_engine.bench.machine import model_record, provenance
    from compiled_engine.bench.serving.http_workload import STEPS, HttpWorkload
    from compiled_engine.bench.workloads import generate_seconds

    sent = HttpWorkload(**workload)
    generator = random.Random(sent.seed)
    rates = []
    for _ in range(repeats + 1):  # the first warms up
        prompts, lengths = sent.requests(generator.randrange(sent.vocab_size))
        seconds = generate_seconds(llm, prompts, lengths, temperature=sent.temperature, detokenize=True)
        rates.append(sum(lengths) / seconds)
    mixed_step_ms(llm, generator, sent.mixed_decodes, sent.mixed_context, sent.mixed_prompt, STEPS)
    mixed = mixed_step_ms(llm, generator, sent.mixed_decodes, sent.mixed_context, sent.mixed_prompt, STEPS)
    return {
        "output_throughput": rates[1:],
        "mixed_step_ms": mixed,
        "model": model_record(llm.config, None),
        **provenance(llm.config.device),
    }


def main() -> None:
    """Whatever a library prints goes to stderr: stdout is for results alone."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(record: dict[str, Any]) -> None:
        print(json.dumps(record), file=results, flush=True)

    say({"result": run(json.load(sys.stdin), say)})


if __name__ == "__main__":
    main()
