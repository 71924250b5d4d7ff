"""Checkpoints into memory: every tensor in its place, or an error that names what is wrong, and no copy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from torch import nn

from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.checkpoint.loader import fill_with_random_weights, load_weights
from compiled_engine.models.checkpoint.parameters import (
    STAGED_BYTES,
    InsufficientMemoryError,
    Weights,
    materialize,
    parameters_of,
)
from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework.parameter import CODES, COLUMNS, KEPT, ROW_SCALES, SCALES, ZEROS, Parameter, made
from compiled_engine.passes.framework.parameter import packed as pack
from compiled_engine.passes.framework.rounding import decode, unpack
from compiled_engine.process.progress import SilentProgress
from compiled_engine.quantisation import ELEMENTS, LinearScheme

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INDEX = "model.safetensors.index.json"
CPU = torch.device("cpu")
Packed = dict[str, tuple[str, ...]]
NOTHING_PACKED: Packed = {}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def packed_linears(num_layers: int) -> Packed:
    """q, k and v packed, weights and biases, and gate and up, in every layer."""
    packed = {}
    for layer in range(num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for kind in ("weight", "bias"):
            members = tuple(f"{attention}.{name}_proj.{kind}" for name in "qkv")
            packed[f"layer_{layer}.qkv.{kind}"] = members
        members = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        packed[f"layer_{layer}.gate_up.weight"] = members
    return packed


def read(path: Path, dtype: str = "auto", load_format: str = "auto") -> ModelConfig:
    config, _ = read_model_config(
        path, dtype=dtype, max_model_len=None, load_format=load_format, seed=3, device_type="cpu"
    )
    return config


def described(model: nn.Module, packed: Packed) -> list[Parameter]:
    """Return the model's parameters, and these packed ones in addition."""
    own = {parameter.name: parameter for parameter in parameters_of(model)}
    return [*own.values(), *(pack(name, tuple(own[member] for member in names)) for name, names in packed.items())]


def load(config: ModelConfig, packed: Packed = NOTHING_PACKED, device: torch.device = CPU) -> nn.Module:
    model = build_model(config)
    weights = materialize(model, described(model, packed), device)
    load_weights(weights, model, config, SilentProgress())
    return model


def assert_holds(model: nn.Module, oracle: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    expected = dict(oracle.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name].to(parameter.device, parameter.dtype)), name


def expect_error(path: Path, *parts: str) -> None:
    """Expect load_weights to raise a ValueError with every part in its message, and to change no parameter."""
    config = read(path)
    model = build_model(config)
    weights = materialize(model, parameters_of(model), CPU)
    for parameter in model.parameters():
        parameter.fill_(42)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked below)
        load_weights(weights, model, config, SilentProgress())
    for part in parts:
        assert part in str(error.value)
    assert all(bool((parameter == 42).all()) for parameter in model.parameters())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of several files with an index."""
    make_checkpoint(tmp_path, "llama", max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    return tmp_path


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint of one file."""
    make_checkpoint(tmp_path, "llama")
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite the single file of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_every_stored_dtype_becomes_every_other(stored: str, wanted: str, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "qwen3", dtype=DTYPES[stored], max_shard_size="50KB")
    model = load(read(tmp_path, wanted))
    assert {parameter.dtype for parameter in model.parameters()} == {DTYPES[wanted]}
    assert_holds(model, oracle)


def test_shards_load_with_an_index_and_without(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "qwen2", max_shard_size="50KB")
    assert_holds(load(read(tmp_path)), oracle)
    (tmp_path / INDEX).unlink()
    assert_holds(load(read(tmp_path)), oracle)


def test_files_outside_the_index_are_not_read(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"another format")
    load(read(sharded))


def test_packed_parameters_share_memory_with_their_members(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "qwen2", num_key_value_heads=1, max_shard_size="50KB")
    config = read(tmp_path)
    packed = packed_linears(config.num_layers)
    model = build_model(config)
    weights = materialize(model, described(model, packed), CPU)
    load_weights(weights, model, config, SilentProgress())
    tensors = weights.tensors
    assert_holds(model, oracle)
    for packed_name, names in packed.items():
        members = [model.get_parameter(name) for name in names]
        assert torch.equal(tensors[packed_name], torch.cat(members))
        row = 0
        for member in members:
            assert member.data_ptr() == tensors[packed_name][row:].data_ptr()
            row += len(member)

    own = dict(model.named_parameters()) | dict(model.named_buffers())
    assert tensors.keys() == packed.keys() | own.keys()
    assert all(tensors[name] is tensor for name, tensor in own.items())


def test_a_tied_parameter_is_one_under_both_names(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    config = read(tmp_path)
    model = build_model(config)
    weights = materialize(model, parameters_of(model), CPU)
    load_weights(weights, model, config, SilentProgress())
    tensors = weights.tensors
    assert tensors[HEAD] is tensors[EMBEDDING]
    assert tensors[HEAD] is model.get_parameter(HEAD)
    assert torch.equal(tensors[HEAD], oracle.get_parameter(EMBEDDING))


@pytest.mark.parametrize(
    ("packed", "part"),
    [
        ({"p": (NORM, NORM)}, f"more than once: {NORM}"),
        ({"p": (NORM,), "q": (NORM,)}, f"more than once: {NORM}"),
        ({"p": (EMBEDDING, NORM)}, "agree"),
        ({"p": ()}, "agree"),
        ({HEAD: (EMBEDDING,)}, f"taken: {HEAD}"),
    ],
)
def test_packed_parameters_that_do_not_fit_are_refused(packed: Packed, part: str, single: Path) -> None:
    model = build_model(read(single))
    with pytest.raises(ValueError, match=part):
        materialize(model, described(model, packed), CPU)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_parameters_that_the_model_does_not_have_are_refused(single: Path) -> None:
    model = build_model(read(single))
    norm = model.get_parameter(NORM)
    for wrong, message in (
        (Parameter.of("model.norm.bias", norm), "the model lacks: model.norm.bias"),
        (Parameter.of(NORM, norm[1:]), "model.norm.weight would be"),
        (Parameter.of(NORM, norm.bfloat16()), "model.norm.weight would be"),
    ):
        with pytest.raises(ValueError, match=message):
            materialize(model, [wrong], CPU)
    doubled = made(Parameter.of(NORM, norm), "mul", 2.0, norm)
    with pytest.raises(ValueError, match=r"described in two ways: model\.norm\.weight\.mul"):
        materialize(model, [doubled, replace(doubled, make=(("mul", 3.0),))], CPU)


def test_what_is_made_of_tensors_follows_them(tmp_path: Path) -> None:
    """After an update of the checkpoint, derived parameters are recomputed in the same memory; their inputs take
    none."""
    make_checkpoint(tmp_path, "qwen2")
    config = read(tmp_path, "bfloat16")
    model = build_model(config)
    own = {parameter.name: parameter for parameter in parameters_of(model)}
    norm, gate, up = own[NORM], own["model.layers.0.mlp.gate_proj.weight"], own["model.layers.0.mlp.up_proj.weight"]
    fp32 = made(norm, "to", "float32", model.get_parameter(NORM).float())
    shifted = made(fp32, "add", 1.0, model.get_parameter(NORM).float())
    both = pack("gate_up", (gate, up))
    halved = made(both, "mul", 0.5, torch.empty(both.shape, dtype=config.dtype, device="meta"))
    weights = materialize(model, [shifted, both, halved, up, fp32], CPU)
    assert model.get_parameter(NORM).is_meta
    places = {name: tensor.data_ptr() for name, tensor in weights.tensors.items()}
    for factor in (1, 3):
        edit(tmp_path, lambda tensors, factor=factor: [tensor.mul_(factor) for tensor in tensors.values()])  # type: ignore[misc]
        load_weights(weights, build_model(config), config, SilentProgress())
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
        rows = torch.cat([tensors[gate.name], tensors[up.name]])
        assert torch.equal(weights.tensors["gate_up"], rows)
        assert torch.equal(weights.tensors[halved.name], rows * 0.5)
        assert torch.equal(weights.tensors[up.name], tensors[up.name])
        assert torch.equal(weights.tensors[fp32.name], tensors[NORM].float())
        assert torch.equal(weights.tensors[shifted.name], tensors[NORM].float() + 1)
        assert places == {name: tensor.data_ptr() for name, tensor in weights.tensors.items()}


def test_few_tensors_at_a_time_are_there_only_for_others() -> None:
    """Each input of derived parameters is read once. On the meta device inputs take no memory."""
    meta = torch.device("meta")
    like = torch.empty(STAGED_BYTES // 2, dtype=torch.bfloat16, device=meta)
    model = nn.ParameterDict({name: nn.Parameter(like, requires_grad=False) for name in "abc"})
    own = parameters_of(model)
    halves = [made(parameter, "mul", 0.5, like) for parameter in own]
    weights = materialize(model, [*halves, made(own[1], "to", "float16", like.half())], meta)
    read = [[leaf.name for leaf, _ in batch] for batch in weights.batches()]
    assert read == [[], ["a"], ["b"], ["c"]]
    assert not weights.tensors.keys() & model.keys()


def test_what_the_engine_keeps_is_left_alone(single: Path) -> None:
    config = read(single)
    model = build_model(config)
    table = Parameter("slots.scale", (4, 8), "float16", KEPT)
    weights = materialize(model, [*parameters_of(model), table], CPU)
    load_weights(weights, model, config, SilentProgress())
    assert torch.equal(weights.tensors[table.name], torch.zeros(4, 8, dtype=torch.float16))
    weights.tensors[table.name].fill_(3)
    for again in (config, replace(config, load_format="dummy")):
        load_weights(weights, model, again, SilentProgress())
        assert bool((weights.tensors[table.name] == 3).all())
    with pytest.raises(ValueError, match=f"taken: {NORM}"):
        materialize(build_model(config), [replace(table, name=NORM)], CPU)


def test_descriptions_survive_json(single: Path) -> None:
    own = parameters_of(build_model(read(single)), {NORM: Shard((64,), 0, (Section(64, 2), Section(8, 1)))})
    first = made(own[0], "to", "float16", torch.empty(own[0].shape, dtype=torch.float16))
    for parameter in (*own, first, pack("two", (first, replace(first, name="other")))):
        assert Parameter.from_json(json.loads(json.dumps(asdict(parameter)))) == parameter


def test_too_little_memory_is_an_error_before_anything_is_allocated(single: Path) -> None:
    config = replace(read(single), vocab_size=2**44, tie_word_embeddings=True)
    model = build_model(config)
    needed = 2**44 * config.hidden_size * 4 / 2**30
    with pytest.raises(InsufficientMemoryError, match=rf"need {needed:.2f} GiB; cpu has \d+\.\d\d GiB free"):
        materialize(model, parameters_of(model), CPU)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert issubclass(InsufficientMemoryError, MemoryError)


def test_all_misfits_are_listed_at_once(single: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.scale"] = torch.ones(3)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(5, 6)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(80, 56, dtype=torch.int8)

    edit(single, change)
    expect_error(
        single,
        "1 missing: model.norm.weight",
        "1 unexpected: model.layers.0.self_attn.q_proj.scale",
        "1 of another shape: model.layers.1.mlp.up_proj.weight ([5, 6] instead of [80, 56])",
        "model.layers.2.mlp.up_proj.weight (torch.int8)",
    )


def test_a_long_list_of_names_is_cut_short_and_counted(single: Path) -> None:
    edit(single, lambda tensors: tensors.update({f"extra.{i:02}": torch.ones(1) for i in range(25)}))
    expect_error(single, "25 unexpected: extra.00, ", "extra.09, ... (25 in all)")


def test_a_missing_head_is_an_error_unless_it_is_tied(single: Path) -> None:
    edit(single, lambda tensors: tensors.pop(HEAD))
    expect_error(single, f"1 missing: {HEAD}")


@pytest.mark.parametrize("kept", [(HEAD,), (EMBEDDING,), (HEAD, EMBEDDING)])
def test_tied_weights_load_from_either_name(kept: tuple[str, ...], tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors.pop(EMBEDDING)
        tensors.update({name: embedding.clone() for name in kept})

    edit(tmp_path, change)
    assert_holds(load(read(tmp_path)), oracle)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    expect_error(tmp_path, "tie_word_embeddings", HEAD, EMBEDDING)


def test_recomputed_buffers_in_old_checkpoints_are_ignored(single: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(single, lambda tensors: tensors.update({name: torch.ones(8)}))
    load(read(single))


def test_a_missing_shard_is_named_before_anything_else_is_done(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"missing: {shard.name}"):
        read(sharded)


def test_damaged_shards_are_named(sharded: Path) -> None:
    first, second, third, *_ = sorted(sharded.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(b"\xff" * 64)
    third.write_bytes(b"")
    expect_error(sharded, *(f"{shard.name} is damaged" for shard in (first, second, third)))


def test_an_index_that_names_absent_tensors_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = next(iter(index["weight_map"].values()))
    (sharded / INDEX).write_text(json.dumps(index))
    expect_error(sharded, INDEX, "model.layers.9.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "damaged"),
        ('{"weight_map": []}', "weight_map must be an object"),
        ('{"weight_map": {"a": 1}}', "a must be a string"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "a file in the folder"),
    ],
)
def test_a_damaged_index_is_refused(text: str, part: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ValueError, match=part):
        read(sharded)


def test_files_without_tensors_are_refused(single: Path) -> None:
    edit(single, lambda tensors: tensors.clear())
    expect_error(single, "no tensors")


def test_a_tensor_in_two_files_is_refused(single: Path) -> None:
    save_file({HEAD: torch.ones(1)}, single / "another.safetensors")
    (single / "model.safetensors").rename(single / "weights.safetensors")
    expect_error(single, "weights.safetensors repeats", HEAD)


class CountingProgress:
    """Remembers the name, the total and the sum of each stage."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None, int]] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        counts: list[int] = []
        yield counts.append
        self.stages.append((name, total, sum(counts)))


def check_progress(config: ModelConfig, device: torch.device) -> None:
    model = build_model(config)
    weights = materialize(model, parameters_of(model), device)
    progress = CountingProgress()
    load_weights(weights, model, config, progress)
    num_tensors = len(list(model.parameters()))
    assert progress.stages == [("load weights", num_tensors, num_tensors)]


def test_progress_counts_tensors(sharded: Path) -> None:
    check_progress(read(sharded), CPU)


def test_dummy_weights_follow_from_seed_and_name_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2")
    (tmp_path / "model.safetensors").unlink()
    config = read(tmp_path, load_format="dummy")
    model = load(config)
    assert_holds(load(config, packed_linears(config.num_layers)), model)
    shallow = load(replace(config, num_layers=1))
    for name, parameter in shallow.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    other_seed = dict(load(replace(config, seed=4)).named_parameters())
    values: set[float] = set()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, other_seed[name])
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        assert abs(parameter.mean() - mean) < 0.02
        assert 0.01 < parameter.std() < 0.03
        values.add(parameter.flatten()[0].item())
    assert len(values) == len(other_seed), "no two parameters start alike"


@pytest.mark.parametrize("element", ELEMENTS)
def test_dummy_codes_stand_for_values_of_small_deviation(element: str) -> None:
    scheme = f"{element} 1x32{', columns reordered' if ELEMENTS[element].has_zeros else ''}"
    rounding, dtype = LinearScheme.parse(scheme).weight, str(ELEMENTS[element].dtype).removeprefix("torch.")
    leaves = [
        Parameter("w.codes", rounding.stored(256, 1024), dtype, CODES, scheme=scheme),
        Parameter("w.scales", (256, 32), "float32", SCALES, scheme=scheme),
        Parameter("w.zeros", (256, 32), "uint8", ZEROS, scheme=scheme),
        Parameter("w.columns", (1, 1024), "int32", COLUMNS, scheme=scheme),
        Parameter("w.row_scales", (256, 1), "float32", ROW_SCALES, scheme=scheme),
    ]
    tensors = {leaf.name: torch.zeros(leaf.shape, dtype=leaf.torch_dtype) for leaf in leaves}
    fill_with_random_weights(Weights(tuple(leaves), tensors), seed=0)
    codes, scales, zeros, columns, row_scales = tensors.values()
    values = decode(codes, scales, rounding, zeros) * (row_scales if rounding.format.row_scales else 1)
    assert abs(float(values.mean())) < 0.003  # codes of four bits reach from -8 to 7
    assert 0.015 < float(values.std()) < 0.027
    assert columns[0].sort().values.tolist() == list(range(1024))


PACKED_ELEMENTS = [name for name, element in ELEMENTS.items() if element.per_byte > 1]


@pytest.mark.parametrize("element", [*PACKED_ELEMENTS, "made of weights"])
def test_dummy_codes_of_four_bits_are_of_all_kinds_in_every_row(element: str) -> None:
    """A benchmark with codes of zeros alone would draw less power, and so run at higher clocks than a checkpoint."""
    online = "int4 1x128"
    scheme = f"{element} 1x32" if element in ELEMENTS else online
    shape = LinearScheme.parse(scheme).weight.stored(64, 1024)
    leaf = Parameter("w.codes", shape, "uint8", CODES, scheme=scheme)
    if element not in ELEMENTS:
        weight = Parameter("w", (64, 1024), "float32")
        leaf = Parameter("w.codes", shape, "uint8", members=(weight,), make=((CODES, online),))
    tensors = {leaf.name: torch.zeros(shape, dtype=torch.uint8)}
    fill_with_random_weights(Weights((leaf,), tensors), seed=0)
    for row in unpack(tensors[leaf.name], LinearScheme.parse(scheme).weight):
        counts = row.bincount(minlength=16)
        assert int((counts > 0).sum()) >= 14
        assert int(counts.max()) < len(row) / 5


def cuda_checkpoint(path: Path) -> nn.Module:
    """Large enough that tensors span several chunks, some ending in the middle of one."""
    sizes = {"vocab_size": 9001, "hidden_size": 448, "intermediate_size": 11000, "head_dim": 64}
    return make_checkpoint(path, "qwen2", dtype=torch.bfloat16, max_shard_size="30MB", **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", DTYPES)
def test_cuda_gets_the_same_values(wanted: str, tmp_path: Path) -> None:
    oracle = cuda_checkpoint(tmp_path)
    config = read(tmp_path, wanted)
    model = load(config, packed_linears(config.num_layers), torch.device("cuda", 0))
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert_holds(model, oracle)
    check_progress(config, torch.device("cuda", 0))


@pytest.mark.gpu
def test_an_error_in_a_copying_thread_reaches_the_caller(tmp_path: Path) -> None:
    class Broken:
        @contextmanager
        def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
            def advance(count: int) -> None:
                raise OSError("stderr is gone")

            yield advance

    cuda_checkpoint(tmp_path)
    config = read(tmp_path)
    model = build_model(config)
    weights = materialize(model, parameters_of(model), torch.device("cuda"))
    with pytest.raises(OSError, match="stderr is gone"):
        load_weights(weights, model, config, Broken())


@pytest.mark.gpu
def test_dummy_weights_on_cuda_repeat_themselves(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    config = read(tmp_path, "bfloat16", "dummy")
    assert_holds(load(config, device=torch.device("cuda")), load(config, device=torch.device("cuda")))


@pytest.mark.gpu
def test_too_little_gpu_memory_is_an_error(single: Path) -> None:
    model = build_model(replace(read(single), vocab_size=2**44))
    with pytest.raises(InsufficientMemoryError, match=r"GiB; cuda:0 has \d+\.\d\d GiB free"):
        materialize(model, parameters_of(model), torch.device("cuda", 0))
