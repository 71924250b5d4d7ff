"""Dynamo's guards by what they are about, and the reason for which each holds without a check."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from compiled_engine.graphs.compiler.guards import describe_guards


def guard(name: str, kind: str, *code: str, method: bool = False) -> Any:
    """A guard as a version of torch has it: its name is a value, or a method."""
    named: Any = (lambda: name) if method else name
    return SimpleNamespace(name=named, create_fn_name=lambda: kind, code_list=list(code) or None)


WEIGHT = "L['model']._modules['layers']._modules['{}']._parameters['weight']"


@pytest.mark.parametrize(
    ("name", "kind", "subject"),
    [
        ("", "SHAPE_ENV", "input sizes"),
        ("", "GRAD_MODE", "state of torch"),
        ("", "DETERMINISTIC_ALGORITHMS", "state of torch"),
        ("", "GLOBAL_STATE", "state of torch"),
        ("", "TORCH_FUNCTION_STATE", "state of torch"),
        ("", "DEFAULT_DEVICE", "state of torch"),
        ("", "AUTOGRAD_SAVED_TENSORS_HOOKS", "state of torch"),
        ("", "FSDP_TRAINING_STATE", "state of torch"),
        ("", "DUAL_LEVEL", "state of torch"),
        ("", "FUNCTORCH_STACK_MATCH", "state of torch"),
        (WEIGHT.format(3), "TENSOR_MATCH", "parameters"),
        ("L['model']._buffers['table']", "TENSOR_MATCH", "parameters"),
        (WEIGHT.format(3), "TYPE_MATCH", "model"),
        ("L['model']", "ID_MATCH", "model"),
        ("L['model'].scale", "EQUALS_MATCH", "model"),
        ("G['rotate']", "FUNCTION_MATCH", "code"),
        ("G['__builtins_dict___7']['len']", "ID_MATCH", "code"),
        ("L['input_ids_T']", "TENSOR_MATCH", "inputs"),
        ("L['kv_caches'][3]", "TENSOR_MATCH", "inputs"),
        ("L['attention_inputs'].backend", "EQUALS_MATCH", "inputs"),
        ("", "NEW_KIND", ""),
        ("S['something else']", "ID_MATCH", ""),
        ("L['model']", "", ""),
    ],
)
def test_each_sort_of_guard_has_its_subject_and_its_reason(name: str, kind: str, subject: str) -> None:
    """One that nothing accounts for has neither."""
    for method in (False, True):
        (record,) = describe_guards([guard(name, kind, "a condition", method=method)])
        assert (record.subject, record.kind, record.count) == (subject, kind, 1)
        assert bool(record.discharged) is bool(subject)


def test_reasons_differ_by_subject() -> None:
    found = describe_guards(
        guard(name, kind, "a condition")
        for name, kind in (
            *(("", "SHAPE_ENV"), ("", "GRAD_MODE"), (WEIGHT.format(0), "TENSOR_MATCH"), ("L['model']", "ID_MATCH")),
            *(("G['f']", "ID_MATCH"), ("L['input_ids_T']", "TENSOR_MATCH"), ("", "NEW_KIND")),
        )
    )
    subjects = ["", "input sizes", "state of torch", "parameters", "model", "code", "inputs"]
    assert [record.subject for record in found] == subjects  # what needs a look comes first
    assert len({record.discharged for record in found}) == len(subjects)


def test_layers_are_counted_together_and_the_many_come_first() -> None:
    few = [guard(WEIGHT.format(n), "TENSOR_MATCH", "check_tensor(...)") for n in range(2)]
    many = [guard(WEIGHT.format(n), "TYPE_MATCH", f"___check_type_id({WEIGHT.format(n)}, 7)") for n in range(3)]
    caches = [guard(f"L['kv_caches'][{n}]", "TENSOR_MATCH") for n in range(4)]
    single = [guard("L['model']", "ID_MATCH", "x")]
    found = describe_guards([*single, *few, *caches, *many])
    assert [(record.subject, record.kind, record.count) for record in found] == [
        *(("parameters", "TENSOR_MATCH", 2), ("model", "TYPE_MATCH", 3)),
        *(("model", "ID_MATCH", 1), ("inputs", "TENSOR_MATCH", 4)),
    ]
    assert found[0].conditions == (("model.layers.*.weight", 2),)
    assert found[3].conditions == (("kv_caches[*]", 4),)


def test_conditions_on_sizes_are_all_kept_and_of_others_the_shortest() -> None:
    sizes = guard("", "SHAPE_ENV", "L['x'].size()[0] <= 64", "2 <= L['x'].size()[0]")
    other = guard("L['model'].scale", "EQUALS_MATCH", "L['model'].scale == 2 and True", "L['model'].scale == 2")
    bare = guard("L['model'].scale", "CONSTANT_MATCH")
    found = {record.kind: record.conditions for record in describe_guards([sizes, other, bare])}
    assert found == {
        "SHAPE_ENV": (("x.size()[0] <= 64", 1), ("2 <= x.size()[0]", 1)),
        "EQUALS_MATCH": (("model.scale == 2", 1),),
        "CONSTANT_MATCH": (("model.scale", 1),),
    }


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("___check_type_id(L['model'], 94037), type=<class 'm.Model'>", "type(model) is m.Model"),
        ("___check_obj_id(G['f'], 140), type=<class 'function'>", "G['f'] is the same object"),
        ("L['model']._modules['norm']._parameters['weight'].x", "model.norm.weight.x"),
        ("L['model']._buffers['table']", "model.table"),
        ("G['__import_torch_dot_nn'].Linear", "torch.nn.Linear"),
        ("G['__builtins_dict___12']['len']", "builtins.len"),
    ],
)
def test_conditions_are_written_with_the_models_names(condition: str, words: str) -> None:
    (record,) = describe_guards([guard("L['model']", "ANY_MATCH", condition)])
    assert record.conditions == ((words, 1),)
