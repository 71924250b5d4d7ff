"""Requests with adapters: what each gets is what the base model with that adapter merged would give it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from adapter_folders import BASE, LINEARS, OPTIONS, assert_is_of, digest_of, make_adapter, merged
from checkpoints import make_checkpoint
from left_over import wait_until
from torch import nn

from compiled_engine import LLM, LoRARequest, SamplingParams, async_llm
from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.adapters import slots as adapter_slots
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.models.checkpoint import adapter_folder
from compiled_engine.models.checkpoint.adapter_folder import Adapter, read_adapter

PROMPTS = [[3, 99, 5, 27, 64, 8, 120, 41], [7] * 20, list(range(1, 34)), [11, 12], [90, 2, 90, 2, 90], [55]]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, prompt_logprobs=0)
WAYS: dict[str, dict[str, Any]] = {
    "rank 1": {"rank": 1},
    "rank 64": {"rank": 64, "size": 0.5},
    "rslora, q and v": {"rank": 4, "targets": ("q_proj", "v_proj"), "use_rslora": True},
    "patterns": {"rank": 4, "ranks": {"q_proj": 16, "up_proj": 2}, "alpha_pattern": {"q_proj": 3}},
    "output projection": {"rank": 16, "targets": ("lm_head",)},
}


class Adapted(NamedTuple):
    """An engine, its base model, and adapters by name."""

    llm: LLM
    base: Path
    model: nn.Module
    folders: dict[str, Path]

    def request(self, name: str | None) -> LoRARequest | None:
        return None if name is None else LoRARequest(name, 1 + list(self.folders).index(name), self.folders[name])

    def generate(self, names: Sequence[str | None], params: SamplingParams = GREEDY) -> list[RequestOutput]:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[: len(names)]]
        return self.llm.generate(prompts, params, lora_request=[self.request(name) for name in names])


def called(core: Any, name: str, **arguments: Any) -> Any:
    return core.call(ControlCall(name, arguments))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    path = tmp_path_factory.mktemp("adapted")
    model = make_checkpoint(path / "base", "qwen3", **BASE)
    folders = {
        name: make_adapter(path / str(seed), model, seed=seed, **how) for seed, (name, how) in enumerate(WAYS.items())
    }
    with LLM(path / "base", strict_passes=True, **OPTIONS) as llm:
        yield Adapted(llm, path / "base", model, folders)


def test_a_batch_of_adapters_and_none(adapted: Adapted) -> None:
    """There are more adapters than slots, and one more than copies in host memory; a prompt comes in chunks."""
    names = [None, *WAYS]
    outputs = adapted.generate(names)
    for name, output in zip(names, outputs, strict=True):
        assert_is_of(merged(adapted.base, None if name is None else adapted.folders[name]), output)
        assert output.lora_request == adapted.request(name)
    texts = {name: tuple(output.outputs[0].token_ids) for name, output in zip(names, outputs, strict=True)}
    assert len(set(texts.values())) > len(WAYS) - 1
    adapted.llm.core.check_integrity()
    metrics = adapted.llm.metrics()
    assert metrics["adapters_in_slots"] == 2
    assert metrics["adapters_loaded"] <= len(WAYS)


def test_steps_without_adapters_run_the_forward_without_the_pass(adapted: Adapted) -> None:
    passes = adapted.llm.metrics()["passes"]
    assert "adapters" not in passes["1-16"]
    assert "adapters" not in passes.get("logits/1-16", {})
    assert passes["adapted/1-16"]["adapters"] == {"matches": 8, "contract": 8}
    assert passes["adapted_logits/1-16"]["adapters"] == {"matches": 1, "contract": 1}
    assert "gated_linear" not in passes["adapted/1-16"]


def test_eager_code_has_adapters_too(adapted: Adapted) -> None:
    with LLM(adapted.base, mode="eager", **OPTIONS) as llm:
        eager = adapted._replace(llm=llm)
        test_a_batch_of_adapters_and_none(eager)
        test_tokens_are_the_same_alone_and_beside_others(eager)
        test_a_prefix_is_not_shared_with_another_adapter(eager)
        assert llm.metrics()["passes"] == {}


def test_tokens_are_the_same_alone_and_beside_others(adapted: Adapted) -> None:
    sampled = SamplingParams(max_tokens=6, temperature=0.8, seed=5, ignore_eos=True)
    together = adapted.generate([None, "rank 1", "patterns"], sampled)
    alone = adapted.llm.generate({"prompt_token_ids": PROMPTS[2]}, sampled, lora_request=adapted.request("patterns"))
    assert together[2].outputs[0].token_ids == alone[0].outputs[0].token_ids


def test_a_prefix_is_not_shared_with_another_adapter(adapted: Adapted) -> None:
    ids, params = [17] * 33, SamplingParams(max_tokens=2, temperature=0)
    cached = []
    for name in (None, "rank 1", "rank 64", "rank 1", None):
        (output,) = adapted.llm.generate({"prompt_token_ids": ids}, params, lora_request=adapted.request(name))
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32]


def test_replaced_files_are_another_adapter(adapted: Adapted, tmp_path: Path) -> None:
    folder, ids = make_adapter(tmp_path / "adapter", adapted.model, 4, seed=7), [23] * 33
    request = LoRARequest("one", 9, folder)
    outputs = []
    for seed in (7, 8):
        make_adapter(folder, adapted.model, 4, seed=seed)
        outputs += adapted.llm.generate({"prompt_token_ids": ids}, GREEDY, lora_request=request)
        assert_is_of(merged(adapted.base, folder), outputs[-1])
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


def test_files_that_are_replaced_between_the_digest_and_the_reading_are_refused(
    adapted: Adapted, tmp_path: Path
) -> None:
    """Else a request would run with an adapter whose digest, and so whose cached prefixes, are another's."""
    folder = make_adapter(tmp_path / "adapter", adapted.model, 4, seed=11)
    named = digest_of(folder)
    make_adapter(folder, adapted.model, 4, seed=12)
    with pytest.raises(ControlError, match="has changed since its adapter was named; name it again"):
        called(adapted.llm.core, "load_adapter", path=str(folder), digest=named)


def test_steps_run_while_an_adapter_is_read(adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_adapter(tmp_path / "adapter", adapted.model, 4, seed=13)
    digest, core, may_read = digest_of(folder), adapted.llm.core, threading.Event()
    monkeypatch.setattr(
        adapter_slots, "read_adapter", lambda path, **how: (may_read.wait(60), read_adapter(path, **how))[1]
    )
    called(core, "begin_load_adapter", path=str(folder), digest=digest)
    called(core, "begin_load_adapter", path=str(folder), digest=digest)  # is being read
    assert_is_of(adapted.model, adapted.generate([None])[0])
    assert not called(core, "has_read_adapter", digest=digest)
    may_read.set()
    wait_until(lambda: called(core, "has_read_adapter", digest=digest))
    loads = adapted.llm.metrics()["adapter_loads"]
    called(core, "load_adapter", path=str(folder), digest=digest)
    assert adapted.llm.metrics()["adapter_loads"] == loads + 1
    output = adapted.llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=LoRARequest("read", 5, folder))
    assert_is_of(merged(adapted.base, folder), output[0])


def test_few_adapters_are_kept_that_were_read_and_never_loaded(
    adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens when requests are cancelled while their adapters are read."""
    core, read = adapted.llm.core, list[Path]()
    monkeypatch.setattr(
        adapter_slots, "read_adapter", lambda path, **how: (read.append(path), read_adapter(path, **how))[1]
    )
    folders = [make_adapter(tmp_path / str(seed), adapted.model, 2, seed=20 + seed) for seed in range(5)]
    for folder in folders:
        called(core, "begin_load_adapter", path=str(folder), digest=digest_of(folder))
        wait_until(lambda folder=folder: called(core, "has_read_adapter", digest=digest_of(folder)))
    for folder in (folders[-1], folders[0]):
        called(core, "load_adapter", path=str(folder), digest=digest_of(folder))
    assert read == [*folders, folders[0]]


def test_adapters_that_are_read_delay_no_other_request(
    adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other requests have a prompt that is prepared in a thread, as long ones are, or an adapter that was read."""
    may_read, ended = threading.Event(), list[str]()
    slow = [LoRARequest(f"slow {i}", 6 + i, make_adapter(tmp_path / f"{i}", adapted.model, 2)) for i in range(3)]

    def read_slowly(path: Path, **how: Any) -> Adapter:
        if path.parent == tmp_path:
            may_read.wait(5)
            ended.append("reading")
        return read_adapter(path, **how)

    async def complete(engine: AsyncLLM, request: LoRARequest | None) -> None:
        async for _ in engine.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=request):
            pass
        ended.append("no adapter" if request is None else request.lora_name)

    async def serve() -> None:
        engine = AsyncLLM(adapted.base, core="in_process", **OPTIONS)
        await complete(engine, adapted.request("rank 1"))
        monkeypatch.setattr(adapter_folder, "read_adapter", read_slowly)
        monkeypatch.setattr(async_llm, "LONG_TEXT", 0)
        waiting = [asyncio.create_task(complete(engine, request)) for request in slow]
        await asyncio.sleep(0.2)
        await complete(engine, None)
        await complete(engine, adapted.request("rank 1"))
        may_read.set()
        await asyncio.gather(*waiting)
        await engine.shutdown()

    asyncio.run(serve())
    assert ended[:3] == ["rank 1", "no adapter", "rank 1"]
    assert sorted(ended[3:]) == [*["reading"] * 3, *(request.lora_name for request in slow)]


def test_an_adapter_that_was_dropped_is_read_again_beside_steps(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, ended = threading.Event(), list[str]()

    def read_slowly(path: Path, **how: Any) -> Adapter:
        may_read.wait(5)
        ended.append("reading")
        return read_adapter(path, **how)

    async def complete(engine: AsyncLLM, name: str | None) -> None:
        request = adapted.request(name)
        async for _ in engine.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=request):
            pass
        ended.append(name or "no adapter")

    async def serve() -> None:
        engine = AsyncLLM(adapted.base, core="in_process", **OPTIONS)
        for name in WAYS:  # more than there are copies of in host memory
            await complete(engine, name)
        monkeypatch.setattr(adapter_slots, "read_adapter", read_slowly)
        first = asyncio.create_task(complete(engine, "rank 1"))
        await asyncio.sleep(0.2)
        await complete(engine, None)
        may_read.set()
        await first
        await engine.shutdown()

    asyncio.run(serve())
    assert ended == [*WAYS, "no adapter", "reading", "rank 1"]


def test_what_is_no_adapter_for_the_engine_is_refused_in_one_line(adapted: Adapted, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3", num_hidden_layers=2, hidden_size=64)
    deeper = make_checkpoint(tmp_path / "deeper", "qwen3", num_hidden_layers=3)
    longer = make_checkpoint(tmp_path / "longer", "qwen3", num_hidden_layers=2, vocab_size=140)
    trained = make_checkpoint(tmp_path / "trained", "qwen3", num_hidden_layers=2, seed=1)
    refused = {
        r"rank 65; allowed: up to max_lora_rank, 64": make_adapter(tmp_path / "a", adapted.model, 65),
        r"it uses DoRA .*allowed: merge_adapter": make_adapter(tmp_path / "b", adapted.model, use_dora=True),
        r"has no linear model.layers.2.mlp.up_proj": make_adapter(tmp_path / "c", deeper, targets=("2.mlp.up_proj",)),
        r"would change \[\d+, 64\], but the base model's is": make_adapter(tmp_path / "d", other, targets=("q_proj",)),
        r"lm_head was trained on another weight than the base model's; allowed: merge_adapter": make_adapter(
            tmp_path / "e", trained, targets=("lm_head",)
        ),
        r"lm_head would change \[140, \d+\], but the base model's is": make_adapter(
            tmp_path / "f", longer, targets=("lm_head",)
        ),
        r"is no folder": tmp_path / "missing",
    }
    for message, folder in refused.items():
        with pytest.raises(ValueError, match=message) as error:
            adapted.llm.generate([1, 2], lora_request=LoRARequest("bad", 1, folder))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="lora_request must have one entry for each prompt, got 1 for 2 prompts"):
        adapted.llm.generate([[1], [2]], lora_request=[None])
    with pytest.raises(TypeError, match="lora_request must be a LoRARequest"):
        adapted.llm.generate([1, 2], lora_request="adapter")  # type: ignore[arg-type]
    assert_is_of(adapted.model, adapted.generate([None])[0])


def test_an_adapter_that_overflows_ends_its_own_requests_alone(adapted: Adapted, tmp_path: Path) -> None:
    """Beside others, and when others follow in its slot and on its blocks of keys and values."""
    bad = LoRARequest("large", 9, make_adapter(tmp_path / "large", adapted.model, 64, size=1e30))
    prompts = [{"prompt_token_ids": ids} for ids in (PROMPTS[2], *PROMPTS[:3])]
    names = [None, "rank 1", "patterns"]
    for _ in range(2):
        adapted.llm.reset_prefix_cache()
        found = adapted.llm.generate(prompts, GREEDY, lora_request=[bad, *map(adapted.request, names)])
        assert found[0].outputs[0].finish_reason == "error"
        for name, output in zip(names, found[1:], strict=True):
            assert_is_of(merged(adapted.base, None if name is None else adapted.folders[name]), output)
    adapted.llm.reset_prefix_cache()
    test_a_batch_of_adapters_and_none(adapted)


def test_preempted_requests_keep_their_adapters(adapted: Adapted) -> None:
    """In a pool of few blocks, with a step launched before the results of the one before it are there."""
    few = OPTIONS | {"num_blocks": 5, "async_scheduling": True}
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPTS[index]} for index in (0, 3, 5)]
    requests = [adapted.request(name) for name in ("rank 1", "patterns", None)]
    expected = adapted.llm.generate(prompts, params, lora_request=requests)
    with LLM(adapted.base, **few) as llm:
        outputs = llm.generate(prompts, params, lora_request=requests)
        assert llm.metrics()["preemptions"] > 0
        llm.core.check_integrity()
    assert [o.outputs[0].token_ids for o in outputs] == [e.outputs[0].token_ids for e in expected]


TWO: dict[str, Any] = {"tensor_parallel_size": 2}
FOREIGN: dict[str, Any] = {"model_impl": "transformers"}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BOTH = "two ranks with code of transformers"
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    BOTH: ("mistral", TWO | FOREIGN, HEADS | {"vocab_size": 132}),
    "two ranks": ("qwen2", TWO, HEADS),
    "code of transformers": ("mistral", FOREIGN, {}),
    "code of transformers with packed linears": ("phi3", FOREIGN, {}),
}


# Eager, two ranks spend their time on the import of transformers.
APART = pytest.mark.shown_by(
    "passes/test_adapters_pass.py::test_a_ranks_share_is_adapted_before_the_sum",
    "passes/test_adapters_pass.py::test_every_linear_is_adapted",
    "engine/test_adapters.py::test_a_batch_of_adapters_and_none",
)


@pytest.mark.parametrize("mode", [pytest.param("compiled", marks=APART), "eager"])
@pytest.mark.parametrize("which", [pytest.param(name, marks=APART) if name == BOTH else name for name in OTHERS])
def test_other_models_and_two_ranks(which: str, mode: str, tmp_path: Path) -> None:
    family, options, shape = OTHERS[which]
    model = make_checkpoint(tmp_path / "base", family, num_hidden_layers=1, **shape)
    targets = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj") if family == "phi3" else LINEARS
    folders = [
        make_adapter(tmp_path / str(seed), model, 4, targets=(*targets, "lm_head"), seed=seed) for seed in range(2)
    ]
    requests = [None, *(LoRARequest(str(seed), 1 + seed, folder) for seed, folder in enumerate(folders))]
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[: len(requests)]]
    strict = {"strict_passes": True} if mode == "compiled" else {}
    with LLM(tmp_path / "base", mode=mode, **OPTIONS | options | strict) as llm:
        outputs = llm.generate(prompts, GREEDY, lora_request=requests)
    for folder, output in zip([None, *folders], outputs, strict=True):
        assert_is_of(merged(tmp_path / "base", folder), output)
