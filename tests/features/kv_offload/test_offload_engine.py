"""An engine with host blocks yields the tokens of one without a prefix cache, on a CPU."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from adapter_folders import make_adapter
from checkpoints import make_checkpoint
from families import family, write_checkpoint
from image_engines import Oracle, Outputs, Prompt, outputs_of, running

from compiled_engine import LoRARequest
from compiled_engine.engine.cache_memory import block_bytes
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve
from compiled_engine.resolve.recurrences import snapshot_bytes
from compiled_engine.sampling.params import SamplingParams

SIZE, NUM_BLOCKS = 16, 40
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "progress": False,
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "num_blocks": NUM_BLOCKS,
    "block_size": SIZE,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
PREFIXES = [[(7 * start + 3 * place) % 90 + 5 for place in range(400)] for start in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "llama", max_position_embeddings=512)
    return folder


def outputs(llm: LLM) -> list[tuple[tuple[int, ...], list[float], int]]:
    """Return tokens, their log-probabilities and the number of cached tokens, of prompts that evict one another."""
    found = []
    for turn in range(3):
        for prefix in PREFIXES:
            prompt = prefix + [9 + turn] * 5
            (result,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS)
            output = result.outputs[0]
            assert output.logprobs is not None
            values = [row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)]
            found.append((tuple(output.token_ids), values, result.num_cached_tokens or 0))
    return found


@pytest.mark.parametrize(
    "extra",
    [{}, {"kv_cache_dtype": "int8"}],
    ids=["fp32", "int8"],
)
def test_tokens_are_those_of_an_engine_without_a_prefix_cache(folder: Path, extra: dict[str, Any]) -> None:
    with LLM(folder, mode="eager", enable_prefix_caching=False, **OPTIONS, **extra) as llm:
        plain = outputs(llm)
    with LLM(folder, mode="eager", kv_offloading_size=0.01, **OPTIONS, **extra) as llm:
        found, metrics = outputs(llm), llm.metrics()
        host_blocks = llm.config.cache.host_blocks
    assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in plain]
    for (_, values, _), (_, expected, _) in zip(found, plain, strict=True):
        assert values == pytest.approx(expected, abs=0.05 if "kv_cache_dtype" in extra else 1e-4)
    assert [cached for _, _, cached in found] == [0] * 3 + [400] * 6, "a prefix was not found, or only in part"
    assert metrics["kv_offload_loaded"] > 0
    assert metrics["kv_offload_slots"] == host_blocks > 3 * 400 // SIZE
    assert 0 < metrics["kv_offload_bytes"] <= 0.01 * (1 << 30)


@pytest.mark.parametrize(
    ("extra", "size"), [({}, 0.00026), ({"kv_cache_dtype": "int8"}, 0.000073)], ids=["fp32", "int8"]
)
def test_a_restart_finds_its_prefixes(folder: Path, extra: dict[str, Any], size: float, tmp_path: Path) -> None:
    files: dict[str, Any] = {"kv_offloading_size": size, "kv_offloading_folder": tmp_path, **extra}
    with LLM(folder, mode="eager", enable_prefix_caching=False, **OPTIONS, **extra) as llm:
        plain = outputs(llm)
    with LLM(folder, mode="eager", **OPTIONS, **files) as llm:
        assert 400 // SIZE < llm.config.cache.host_blocks < 2 * 400 // SIZE, "there is room for one prefix"
        found, metrics = outputs(llm), llm.metrics()
    assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in plain]
    assert metrics["kv_offload_written"] > 0
    with LLM(folder, mode="eager", **OPTIONS, **files) as llm:
        again, metrics = outputs(llm), llm.metrics()
    assert [tokens for tokens, _, _ in again] == [tokens for tokens, _, _ in plain]
    for (_, values, _), (_, expected, _) in zip(again, plain, strict=True):
        assert values == pytest.approx(expected, abs=0.05 if extra else 1e-4)
    assert min(cached for _, _, cached in again) >= 300
    assert metrics["kv_offload_read"] > 0


RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"async_scheduling": True},
    "qwen3_5_text two ranks": {"tensor_parallel_size": 2},
    "lfm2": {},
}


# Each rank copies its own rows, with the code of one that is alone, into files that the second test reads again.
RANKS_SHOWN = pytest.mark.shown_by(
    "features/kv_offload/test_offload_engine.py::test_states_come_back_with_their_blocks",
    "features/kv_offload/test_offload_engine.py::test_a_crowd_gets_its_tokens",
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=RANKS_SHOWN) if "ranks" in case else case for case in RECURRENT]
)
def test_states_come_back_with_their_blocks(case: str, tmp_path: Path) -> None:
    """The device has room for one snapshot, and a restart finds all of them in files."""
    name, extra = case.split(maxsplit=1)[0], RECURRENT[case]
    few = family(name)
    write_checkpoint(tmp_path / "model", replace(few, changes={**few.changes, "max_position_embeddings": 512}))
    options = OPTIONS | {"dtype": "float32", "mode": "eager"} | extra
    files: dict[str, Any] = {"kv_offloading_size": 0.02, "kv_offloading_folder": tmp_path / "files"}
    with LLM(tmp_path / "model", enable_prefix_caching=False, **options) as llm:
        plain = outputs(llm)
    for is_restart in (False, True):
        with LLM(tmp_path / "model", num_state_snapshots=1, **options, **files) as llm:
            found, metrics = outputs(llm), llm.metrics()
        assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in plain]
        for (_, values, _), (_, expected, _) in zip(found, plain, strict=True):
            assert values == pytest.approx(expected, abs=1e-4)
        cached = [count for _, _, count in found]
        assert cached == ([400] * 9 if is_restart else [0] * 3 + [400] * 6), "a prefix was not found, or only in part"
        assert metrics["kv_offload_loaded_states"] >= 6
        assert (metrics["kv_offload_read_states"] > 0) == is_restart
        assert 0 < metrics["kv_offload_bytes"] <= 0.02 * (1 << 30)


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_blocks_and_snapshots_divide_host_memory(name: str, tmp_path: Path) -> None:
    """Half of it is for snapshots, unless each block has one: those of LFM2 are small."""
    write_checkpoint(tmp_path, family(name))
    given = {"device": "cpu", "mode": "eager", "kv_offloading_folder": tmp_path / "files"}
    config = resolve(EngineOptions(tmp_path, kv_offloading_size=0.01, **given))
    cache, of_state = config.cache, snapshot_bytes(config.model, 1)
    of_block = block_bytes(config)
    used = cache.host_blocks * of_block + cache.host_states * of_state
    assert 0.01 * (1 << 30) - of_block - of_state < used <= 0.01 * (1 << 30)
    assert 1 <= cache.host_states <= cache.host_blocks
    assert cache.host_states * of_state <= 0.005 * (1 << 30)
    assert cache.block_files is not None
    assert cache.block_files.state_weight == -(-of_state // of_block)
    assert f"a snapshot of recurrent states {of_state:,}" in config.reasons["cache.host_states"]
    folder = cache.block_files.folder
    for changed in ({"max_num_seqs": 2}, {"num_state_snapshots": 3}):
        other = resolve(EngineOptions(tmp_path, kv_offloading_size=0.01, **given | changed)).cache.block_files
        assert other is not None
        assert other.folder == folder, "a limit changes which files are found"
    with pytest.raises(ValueError, match="a block and a snapshot of recurrent states, to the"):
        resolve(EngineOptions(tmp_path, kv_offloading_size=of_block / (1 << 30), **given))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_latent_rows_come_back(kv_cache_dtype: str, tmp_path: Path) -> None:
    latent = family("deepseek_v3")
    write_checkpoint(tmp_path, replace(latent, changes={**latent.changes, "max_position_embeddings": 512}))
    options = OPTIONS | {"dtype": "float32", "mode": "eager", "kv_cache_dtype": kv_cache_dtype}
    with LLM(tmp_path, enable_prefix_caching=False, **options) as llm:
        assert llm.config.model.latent_dim
        plain = outputs(llm)
    with LLM(tmp_path, kv_offloading_size=0.01, **options) as llm:
        found, metrics = outputs(llm), llm.metrics()
    assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in plain]
    assert [cached for _, _, cached in found] == [0] * 3 + [400] * 6
    assert metrics["kv_offload_loaded"] > 0


@pytest.mark.usefixtures("one_thread")
def test_prompts_that_differ_in_an_image_alone_are_kept_apart(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path, "LlavaForConditionalGeneration")
    text = [7 * place % 80 + 5 for place in range(300)]
    pictures = {name: oracle.image(2, 3, seed=seed) for seed, name in enumerate(("one", "other"))}
    prompts = {name: Prompt((5, None, *text), (picture,)) for name, picture in pictures.items()}
    prompts["evicting"] = Prompt(tuple(reversed(text)) + (9,) * 100)
    turns: dict[str, list[Outputs]] = {}
    for kind, options in (("plain", {"enable_prefix_caching": False}), ("kept", {"kv_offloading_size": 0.02})):
        with running(oracle, mode="eager", num_blocks=64, **options) as core:
            names = [*prompts, *prompts]
            turns[kind] = [outputs_of(core, [oracle.request(name, prompts[name])]) for name in names]
            metrics = core.metrics()
    for found, expected in zip(turns["kept"], turns["plain"], strict=True):
        for name, (tokens, logprobs) in expected.items():
            assert found[name][0] == tokens
            assert found[name][1] == pytest.approx(logprobs, abs=1e-4)
    assert turns["plain"][0]["one"] != turns["plain"][1]["other"]
    assert metrics["kv_offload_hits"] >= 256


FEW: dict[str, dict[str, Any]] = {
    "planned ahead": {"async_scheduling": True},
    "two ranks": {"async_scheduling": True, "tensor_parallel_size": 2},
}
OTHERS: dict[str, dict[str, Any]] = {
    "two stages": {"mode": "compiled", "compile_ranges": (), "pipeline_parallel_size": 2},
    "compiled": {"mode": "compiled", "compile_ranges": ()},
}


def crowd(llm: LLM, lora: LoRARequest | None) -> list[tuple[int, ...]]:
    """Return the tokens of requests side by side, with prefixes, salts and an adapter in common."""
    rng, found = random.Random(0), []
    for _ in range(4):
        prompts, adapters = [], []
        for _ in range(10):
            prefix, salt = rng.choice(PREFIXES)[: rng.choice([300, 200, 100])], rng.choice([{}, {"cache_salt": "a"}])
            prompts.append({"prompt_token_ids": prefix + [rng.randrange(5, 90)] * rng.randrange(1, 20), **salt})
            adapters.append(rng.choice([None, lora]))
        outputs = llm.generate(prompts, PARAMS, lora_request=adapters, use_tqdm=False)
        found += [tuple(output.outputs[0].token_ids) for output in outputs]
    return found


class Adapted(NamedTuple):
    """A model, an adapter, and the tokens of an engine without a prefix cache, with the adapter and without it."""

    model: Path
    lora: LoRARequest
    tokens: list[tuple[int, ...]]
    plain_tokens: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    path = tmp_path_factory.mktemp("adapted")
    shape: dict[str, Any] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 134,
    }
    model = make_checkpoint(path / "base", "llama", max_position_embeddings=512, **shape)
    lora = LoRARequest("code", 1, make_adapter(path / "code", model, size=2.0))
    with LLM(path / "base", mode="eager", enable_prefix_caching=False, enable_lora=True, **OPTIONS) as llm:
        return Adapted(path / "base", lora, crowd(llm, lora), crowd(llm, None))


# Blocks are copied between steps, whatever runs these.
CROWDS_SHOWN = pytest.mark.shown_by("features/kv_offload/test_offload_engine.py::test_a_crowd_gets_its_tokens")


@pytest.mark.parametrize("way", [*FEW, *(pytest.param(way, marks=CROWDS_SHOWN) for way in OTHERS)])
def test_a_crowd_gets_its_tokens(adapted: Adapted, way: str, tmp_path: Path) -> None:
    lora, expected = (None, adapted.plain_tokens) if way == "two stages" else (adapted.lora, adapted.tokens)
    options = OPTIONS | {"mode": "eager", "enable_lora": lora is not None} | (FEW | OTHERS)[way]
    files: dict[str, Any] = {"kv_offloading_size": 0.0006, "kv_offloading_folder": tmp_path}  # 78 blocks
    with LLM(adapted.model, **options, **files) as llm:
        assert crowd(llm, lora) == expected
        first = llm.metrics()
        assert crowd(llm, lora) == expected
        metrics = llm.metrics()
        assert metrics["kv_offload_read"] > first["kv_offload_read"]
        assert metrics["kv_offload_loaded"] > metrics["kv_offload_read"] > 0
        assert metrics["kv_offload_file_errors"] == 0
        (salted,) = llm.generate([{"prompt_token_ids": PREFIXES[0], "cache_salt": "b"}], PARAMS, use_tqdm=False)
        assert salted.num_cached_tokens == 0


def test_files_are_those_of_a_model_and_a_layout(folder: Path, tmp_path: Path) -> None:
    """Another checkpoint, dtype or block size finds none of them."""
    other = tmp_path / "other"
    make_checkpoint(other, "llama", max_position_embeddings=512, seed=1)
    folders = set()
    for model, changed in (
        (folder, {}),
        (folder, {"max_num_seqs": 2}),
        (folder, {"block_size": 32}),
        (folder, {"kv_cache_dtype": "int8"}),
        (folder, {"dtype": "bfloat16"}),
        (other, {}),
    ):
        given = OPTIONS | {"kv_offloading_size": 0.01, "kv_offloading_folder": tmp_path / "files"} | changed
        del given["progress"]
        config = resolve(EngineOptions(model, mode="eager", **given))
        assert config.cache.block_files is not None
        folders.add(config.cache.block_files.folder)
    assert len(folders) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": False}, "kv_offloading_size is 0.01, but there is no prefix cache"),
        ({"kv_offloading_size": 1e-7}, "kv_offloading_size is 1e-07 GiB; allowed: from .* GiB, a block, to the"),
        ({"kv_offloading_size": 1e6}, "kv_offloading_size is 1000000.0 GiB; allowed: from"),
        (
            {"kv_offloading_size": 0, "kv_offloading_folder": "x"},
            "kv_offloading_folder is 'x', but without kv_offloading_size",
        ),
        ({"kv_offloading_folder": "x", "kv_offloading_folder_size": 1e-9}, "kv_offloading_folder_size is 1e-09 GiB; "),
        ({"kv_offloading_size": -1}, "kv_offloading_size is -1; allowed: at least 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(folder, mode="eager", **OPTIONS | {"kv_offloading_size": 0.01} | options)


@pytest.mark.parametrize(
    ("given", "executor"),
    [
        ("/proc/none", "auto"),
        ("/proc/none", "multiprocess"),
        ("file", "auto"),
        ("file/below", "auto"),
        ("loop", "auto"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_before_weights_are_read(
    given: str, executor: str, folder: Path, tmp_path: Path
) -> None:
    """The file of the weights is broken, so a start that read it first would report that instead."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    named = tmp_path / given
    files = {"kv_offloading_size": 0.01, "kv_offloading_folder": named, "distributed_executor": executor}
    with pytest.raises(
        ValueError, match=rf"^kv_offloading_folder is '{named}', which .*; allowed: a folder to write to$"
    ):
        LLM(tmp_path / "model", mode="eager", **OPTIONS | files)
