"""The requests that lm-eval's `local-completions` sends, read as it reads them: the same numbers as offline."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import httpx
import pytest
from running_server import ENGINE, MODEL, RunningServer

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

CONTEXTS = ("import", "def __init__(self", "class Error(", "    return é")
CONTINUATIONS = (" os", ", name):\n        self.name = name", "Exception):", " None")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def offline() -> Any:
    with LLM(**ENGINE) as llm:
        yield llm


def post(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "seed": 1234, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=itemgetter("index"))


def test_log_likelihoods_are_those_of_the_offline_api(server: RunningServer, offline: Any) -> None:
    encode = server.engine.tokenizer.encode
    contexts = [encode(text) for text in CONTEXTS]
    prompts = [context + encode(text) for context, text in zip(contexts, CONTINUATIONS, strict=True)]
    choices = post(server, {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True})
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    outputs = offline.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for choice, output, prompt, context in zip(choices, outputs, prompts, contexts, strict=True):
        chosen = choice["logprobs"]["token_logprobs"][len(context) : -1]
        alternatives = choice["logprobs"]["top_logprobs"][len(context) : -1]
        expected = [
            entry[token]
            for entry, token in zip(output.prompt_logprobs[len(context) :], prompt[len(context) :], strict=True)
        ]
        assert chosen == pytest.approx([logprob.logprob for logprob in expected], abs=1e-4)
        is_greedy = [own == max(top.values()) for own, top in zip(chosen, alternatives, strict=True)]
        assert is_greedy == [logprob.rank == 1 for logprob in expected]


def test_generations_are_those_of_the_offline_api(server: RunningServer, offline: Any) -> None:
    encode = server.engine.tokenizer.encode
    prompts = [encode(text) for text in CONTEXTS]
    stops = ["\n", "<|endoftext|>"]
    choices = post(server, {"prompt": prompts, "temperature": 0, "max_tokens": 12, "stop": stops})
    params = SamplingParams(temperature=0, max_tokens=12, stop=stops)
    outputs = offline.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [choice["text"] for choice in choices] == [output.outputs[0].text for output in outputs]
