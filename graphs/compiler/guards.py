"""Describes the guards of a trace, with the reason why none of them has to be checked at run time.

While it traces, Dynamo adds a guard for everything that it reads: the model's attributes, called functions, inputs,
torch's state. The engine never calls Dynamo's entry point, so no guard is checked. Each guard must hold by
construction; the rules in this file say why.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch._guards import Guard, TracingContext


@dataclass(frozen=True)
class GuardRecord:
    """All guards of the same kind on the same subject, such as parameters, that hold for the same reason."""

    subject: str
    kind: str
    count: int
    conditions: tuple[tuple[str, int], ...]  # (condition, number of guards), with layer numbers written as *
    discharged: str  # why they hold; empty for unexplained guards


# (subject, pattern of the source, pattern of the kind, why it holds); the first matching rule applies.
_RULES = (
    ("input sizes", r"", r"SHAPE_ENV", "all inputs of a step are made from one batch, within the scheduler's limits"),
    (
        "state of torch",
        r"",
        r"GRAD_MODE|DETERMINISTIC_ALGORITHMS|GLOBAL_STATE|TORCH_FUNCTION_STATE|DEFAULT_DEVICE|AUTOGRAD_SAVED_TENSORS_HOOKS"
        r"|FSDP_TRAINING_STATE|DUAL_LEVEL|FUNCTORCH_STACK_MATCH",
        "every step runs in inference mode, without autocast, on the engine's own device",
    ),
    (
        "parameters",
        r"L\['model'\].*_(parameters|buffers)\[.*",
        r"TENSOR_MATCH",
        "shape and dtype follow from the configuration, a factor of the cache key; the loader checks them",
    ),
    (
        "model",
        r"L\['model'\].*",
        r"\w+",
        "the model is built by us from the configuration and our source, both factors of the cache key",
    ),
    (
        "code",
        r"G\[.*|.*__builtins.*|.*__import_.*|(dict\()?type\(L\['model'\].*",
        r"\w+",
        "our source and the versions of torch and Python are factors of the cache key",
    ),
    (
        "inputs",
        r"L\['\w+'\].*",
        r"\w+",
        "the engine makes every input itself, in buffers of this dtype and layout; number of layers and attention "
        "backend are factors of the cache key",
    ),
)

# Layer indices in a guard's source: L['model']._modules['layers']._modules['3'], L['kv_caches'][3].
_NUMBERS = re.compile(r"(?<=\[')\d+(?='\])|(?<='\]\[)\d+(?=\])")


def dynamo_guards() -> tuple[Guard, ...]:
    """Return all guards that Dynamo has added in this trace. Call it in a backend, when the graph is complete."""
    return tuple(TracingContext.get().guards_context.dynamo_guards)


def describe_guards(guards: Iterable[Guard]) -> tuple[GuardRecord, ...]:
    """Return guards grouped by subject, kind and the reason why they hold; unexplained guards come first.

    Call it after Dynamo has finished, since guards have no conditions before.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for guard in guards:
        source = _NUMBERS.sub("*", guard.name if isinstance(guard.name, str) else guard.name())
        kind = guard.create_fn_name()
        code = guard.code_list or []
        counts.update((source, kind, _NUMBERS.sub("*", one)) for one in _conditions(source, kind, code))
    groups: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for (source, kind, condition), count in counts.items():
        subject, discharged = _account(source, kind)
        groups[subject, kind, discharged][_readable(condition)] += count
    records = [
        GuardRecord(subject, kind, conditions.total(), tuple(conditions.items()), discharged)
        for (subject, kind, discharged), conditions in groups.items()
    ]
    order = ["", *(rule[0] for rule in _RULES)]
    return tuple(sorted(records, key=lambda record: (order.index(record.subject), -record.count)))


def proved_asserts(messages: Iterable[str]) -> tuple[GuardRecord, ...]:
    """Return a tuple with one record of all run-time asserts, which the declared ranges of sizes prove.

    messages: torch's message of each assert. Without asserts, the tuple is empty.
    """
    found = Counter(_asserted(message) for message in messages)
    if not found:
        return ()
    discharged = "proved from the declared ranges of the sizes"
    return (GuardRecord("asserted sizes", "run-time assert", found.total(), tuple(found.items()), discharged),)


def _account(source: str, kind: str) -> tuple[str, str]:
    for subject, source_pattern, kind_pattern, discharged in _RULES:
        if re.fullmatch(source_pattern, source) and re.fullmatch(kind_pattern, kind):
            return subject, discharged
    return "", ""


def _conditions(source: str, kind: str, code: list[str]) -> list[str]:
    """Return the conditions of a guard to show: all for guards on sizes, otherwise the guard's shortest line of code.

    For guards on tensors, and for guards without code, returns the guard's source instead.
    """
    if kind == "SHAPE_ENV":
        return code
    if not code or kind == "TENSOR_MATCH":
        return [source]
    return [min(code, key=len)]


def _readable(condition: str) -> str:
    """Return a guard's condition in readable form: with attribute paths of the model, and without ids of objects.

    The text is then the same in every process.
    """
    condition = re.sub(r"___check_type_id\((.*), \d+\), type=<class '(.*)'>", r"type(\1) is \2", condition)
    condition = re.sub(r"___check_obj_id\((.*), \d+\), type=<.*>", r"\1 is the same object", condition)
    condition = re.sub(r"\._(?:modules|parameters|buffers)\['([\w*]+)'\]", r".\1", condition)
    condition = re.sub(r"L\['(\w+)'\]", r"\1", condition)
    condition = re.sub(r"G\['__import_(\w+?)'\]", lambda match: match[1].replace("_dot_", "."), condition)
    return re.sub(r"G\['__builtins_dict___\d+'\]\['(\w+)'\]", r"builtins.\1", condition)


def _asserted(message: str) -> str:
    match = re.search(r"for expression (.*) on node", message)
    return match[1] if match else message
