"""TRL's client of a server, in a process of its own: updates the weights step by step, and prints what it generates.

    python trl_client.py URL PORT PROMPT [--dies] FOLDER ...

PORT: for the trainer's group. PROMPT: token ids, in JSON. --dies: end in the middle of the first update. For each
folder a line of JSON is printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM
from trl.generation.vllm_client import VLLMClient

DIES = "--dies"
DIES_AFTER = 5


def some_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a few tensors, then kill this process."""
    for number, (name, tensor) in enumerate(model.named_parameters()):
        if number == DIES_AFTER:
            time.sleep(0.5)  # the server awaits the tensors by then
            os.kill(os.getpid(), signal.SIGKILL)
        yield name, tensor.data


def main() -> None:
    url, port, prompt, *folders = sys.argv[1:]
    client = VLLMClient(url, group_port=int(port), connection_timeout=30)
    client.init_communicator("cuda")  # the stand-in of vLLM's communicator uses no GPU
    for folder in folders:
        if folder == DIES:
            continue
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        if DIES in folders:
            metadata = [(name, "bfloat16", list(tensor.shape)) for name, tensor in model.named_parameters()]
            client.update_named_params(metadata, some_of(model))
        client.update_model_params(model)
        client.reset_prefix_cache()
        found = client.generate(
            [json.loads(prompt)],
            temperature=1.0,
            max_tokens=12,
            logprobs=0,
            generation_kwargs={"seed": 7, "ignore_eos": True},
        )
        sequence = [*found["prompt_ids"][0], *found["completion_ids"][0]]
        scored = client.get_sequence_logprobs([sequence], [len(found["prompt_ids"][0])], top_logprobs=5)
        print(json.dumps(found | {"scored": scored["actual_logprobs"]}), flush=True)


if __name__ == "__main__":
    main()
