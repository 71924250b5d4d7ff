"""Steps launched ahead on a device that lags: no step in flight reads what the host wrote for a later one."""

from __future__ import annotations

import random
from collections import deque
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from families import family, write_checkpoint
from lagging_device import lagging_device
from token_masks import ByLastToken

from compiled_engine.engine.messages import EngineRequest
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    {"temperature": 0.8, "logit_bias": {5: 2.0}, "bad_words_token_ids": ((7, 8), (9,)), "min_tokens": 2},
    {"temperature": 0.8, "logprobs": 5},
)


OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "mode": "eager",
    "dtype": "float32",
    "async_scheduling": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "block_size": 4,
    "num_blocks": 200,
}


def prompts(count: int) -> list[dict[str, list[int]]]:
    random_ = random.Random(0)
    return [
        {"prompt_token_ids": [random_.randrange(4096) for _ in range(random_.randrange(9, 20))]} for _ in range(count)
    ]


def tokens(llm: LLM, max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts(16), params, use_tqdm=False)]


def test_a_row_is_taken_while_its_last_prompt_is_in_flight() -> None:
    with LLM(progress=False, **OPTIONS) as llm:
        expected, expected_later = tokens(llm, 1), tokens(llm, 8)
    with LLM(progress=False, **OPTIONS) as llm:
        with lagging_device():
            found = tokens(llm, 1)
        later = tokens(llm, 8)  # what the prefix cache has kept
    assert found == expected
    assert later == expected_later


def test_a_state_is_copied_between_the_steps_before_and_after(tmp_path: Path) -> None:
    """With fewer snapshots than prefixes, which take them from each other while steps are in flight."""
    write_checkpoint(tmp_path, family("lfm2"))
    options = OPTIONS | {"max_num_seqs": 3, "max_model_len": 160, "num_state_snapshots": 2}
    random_ = random.Random(0)

    def ids(count: int) -> list[int]:
        return [random_.randrange(131) for _ in range(count)]

    shared = [ids(72) for _ in range(6)]
    prompts = [{"prompt_token_ids": random_.choice(shared) + ids(random_.randrange(1, 40))} for _ in range(40)]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
    found = []
    for lags in (False, True):
        with LLM(tmp_path, progress=False, **options) as llm, lagging_device() if lags else nullcontext():
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm.metrics()["prefix_hits"] > 0
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[1] == found[0]


def random_requests(seed: int) -> list[EngineRequest]:
    random_ = random.Random(seed)
    requests = []
    for i in range(60):
        way = random_.choice(WAYS)
        params = SamplingParams(
            seed=i,
            max_tokens=max(random_.randrange(1, 20), way.get("min_tokens", 1)),
            stop_token_ids=random_.sample(range(4096), 300),
            **way,
        )
        length = random_.randrange(1, 60)
        ids = tuple(random_.randrange(4096) if random_.random() < 0.5 else i % 3 for _ in range(length))
        requests.append(EngineRequest(str(i), ids, params))
    return requests


def run(options: dict[str, Any], seed: int, aborts: bool) -> dict[str, list[int]]:
    """The tokens of the requests that were not aborted."""
    core = start_core(resolve(EngineOptions(**OPTIONS | options)), SilentProgress())
    random_ = random.Random(seed + 1)
    waiting = deque(random_requests(seed))
    found: dict[str, list[int]] = {}
    aborted: set[str] = set()
    while core.has_unfinished() or waiting:
        for _ in range(random_.randrange(3)):
            if waiting:
                request = waiting.popleft()
                core.add(request, ByLastToken(4096) if int(request.request_id) % 5 == 0 else None)
        for output in core.step():
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
        one = str(random_.randrange(60))
        if aborts and random_.random() < 0.2 and core.abort(one):
            aborted.add(one)
        core.check_integrity()
    core.close()
    return {request_id: ids for request_id, ids in found.items() if request_id not in aborted}


@cache
def without_lag(seed: int) -> dict[str, list[int]]:
    """Tokens depend neither on the blocks that there are nor on what is kept of prefixes."""
    return run({"async_scheduling": False}, seed, aborts=False)


@pytest.mark.product(one_in=16)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_blocks", [200, 40])
def test_random_requests(num_blocks: int, seed: int, pytestconfig: pytest.Config) -> None:
    """Most requests are not aborted; with --all none are in a second run."""
    options = {"num_blocks": num_blocks, "enable_prefix_caching": seed % 2 == 1}
    expected = without_lag(seed)
    for aborts in (False, True) if pytestconfig.getoption("--all") else (True,):
        with lagging_device():
            found = run(options, seed, aborts)
        assert found == {request_id: expected[request_id] for request_id in found}
        assert len(found) == 60 or (aborts and len(found) > 30)
