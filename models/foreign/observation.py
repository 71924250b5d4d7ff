"""Observe one forward of a transformers model on the meta device: how each layer attends, and which layers are equal.

Unsupported features are detected and refused here, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from compiled_engine.config import RowState
from compiled_engine.models.foreign.description import LayerShape
from compiled_engine.models.foreign.latents import Expansion, expansions_recorded, latent_dim_of
from compiled_engine.models.foreign.recurrence import (
    ACTIVATIONS,
    functions_used,
    has_recurrent_family,
    recurrent_modules,
)
from compiled_engine.recurrence.states import CONV_STATE, MATRIX_STATE

_NAME = "compiled_engine_observing"
_TOKENS = 3
# Arguments of attention that do not affect its result.
_WITHOUT_EFFECT = (
    *("dropout", "position_ids", "position_embeddings", "cache_position", "output_attentions", "use_cache"),
    *(
        "deterministic",
        "layer_idx",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "cache",
        "past_key_values",
    ),
)
_POSITIONS = 1 << 20  # masks are evaluated up to this position
# Layer types, as configurations state them, whose layers compute each token independently of other tokens.
_BY_TOKEN = ("mlp", "moe")


class UnsupportedModelError(ValueError):
    """Raised for a model for which the engine cannot guarantee transformers' results."""


_NO_ATTENTION = LayerShape(0, 0, 0, None, 0.0, False)


@dataclass(frozen=True)
class Observation:
    """The result of `observe`: facts about a transformers model, found in one forward."""

    attention: tuple[LayerShape, ...]  # by layer
    modules: tuple[nn.Module, ...]  # attention modules of the layers that have attention
    states: tuple[RowState, ...]  # states of recurrences, in layer order
    layers_path: str  # path of the module list of layers; empty: not found
    signatures: tuple[int, ...]  # by layer; equal for layers that compute the same
    in_tuple: bool  # layers return their hidden states in a tuple


@dataclass(frozen=True, eq=False)
class _Mask:
    """A placeholder for an attention mask that the model asks transformers to create.

    function: the mask function, which is evaluated only when a layer uses the mask, since masks may stay unused.
    """

    tensor: torch.Tensor
    function: Callable[..., Any]

    @cached_property
    def sight(self) -> tuple[int | None, bool]:
        """The mask's sliding window (None: no window), and whether the mask is causal.

        Raises UnsupportedModelError for any other mask, see `_sight_of`.
        """
        return _sight_of(self.function)


class _Slice(NamedTuple):
    """A slice of a tensor that the model takes outside of its layers, such as a layer's part of Gemma 4's embeddings.

    place: the index of the slice in dimension `dim`.
    """

    tensor: Any  # described
    dim: int
    place: int


class _Observer(TorchDispatchMode):
    """A torch dispatch mode that records each layer's ops with descriptions of their inputs.

    Its methods `attend` and `mask` are registered as transformers' interfaces, and record attention calls and masks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, LayerShape] = {}
        self.modules: dict[int, nn.Module] = {}
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keys and values of layers that have their own
        self.masks: list[_Mask] = []
        self.layer: int | None = None
        self.ops: dict[int, list[Any]] = {}
        self.in_tuple = False
        self.expansions: dict[nn.Module, Expansion] = {}
        self._records = True
        self._kept: list[torch.Tensor] = []
        self._origin: dict[int, tuple[int | None, Any]] = {}

    def parameters_of(self, layers: nn.ModuleList) -> None:
        for number, layer in enumerate(layers):
            for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
                self._origin[id(tensor)] = (number, name)

    def enter(self, layer: int, hidden_states: torch.Tensor | None) -> None:
        self.layer = layer
        if hidden_states is not None:  # named alike in every layer, so that equal layers have equal signatures
            self._kept.append(hidden_states)
            self._origin[id(hidden_states)] = (layer, "hidden_states")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._records:
            return result
        ops = self.ops.setdefault(-1 if self.layer is None else self.layer, [])
        ops.append((str(func), tree_map(self._described, args), tree_map(self._described, kwargs or {})))
        is_slice = self.layer is None and func is torch.ops.aten.select.int
        for place, leaf in enumerate(result if isinstance(result, tuple | list) else [result]):
            if isinstance(leaf, torch.Tensor):
                name = _Slice(self._described(args[0]), *args[1:]) if is_slice else (len(ops), place)
                self._kept.append(leaf)  # kept alive, so that its id is not reused
                self._origin[id(leaf)] = (self.layer, name)
        return result

    def _described(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        layer, name = self._origin.get(id(value), (None, None))
        if isinstance(name, _Slice) and name.place == self.layer:  # equal layers read their own slices
            name = "slice of the layer", name.tensor, name.dim
        if layer is None or self.layer is None or layer == self.layer:
            return name, tuple(value.shape), str(value.dtype)
        return ("of layer", layer - self.layer, name), tuple(value.shape), str(value.dtype)

    def mask(self, *, mask_function: Callable[..., Any], **others: Any) -> torch.Tensor:
        tensor = torch.empty(1, 1, _TOKENS, _TOKENS, device="meta")
        self.masks.append(_Mask(tensor, mask_function))
        return tensor

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        own_window: int | None = None,
        linear_bias: bool = False,
        biases_HW: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = getattr(module, "layer_idx", None)
        if layer is None and module not in self.modules.values():  # an encoder's modules may lack the number
            layer = len(self.calls)
        strange = [name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT]
        found = [mask for mask in self.masks if mask.tensor is attention_mask]
        if not isinstance(layer, int) or layer in self.calls:
            raise UnsupportedModelError("its layers attend several times, or are run several times")
        if strange:
            raise UnsupportedModelError(f"its attention takes {', '.join(strange)}")
        if not found and not (attention_mask is None and is_causal):
            raise UnsupportedModelError("its attention is not causal, or its mask is made in an unsupported way")
        if key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
            raise UnsupportedModelError("its heads of q and k differ in size, or those of k and v in number")
        self._records = False  # evaluating the mask is not part of the layer
        window, causal = found[0].sight if found else (None, True)
        latent_dim, of_latents = 0, (0, 0, 0)
        if causal and window is None and not softcap and s_aux is None:
            latent_dim = latent_dim_of(module, self.expansions.get(module), key, value)
        self._records = True
        if biases_HW is not None and causal:
            raise UnsupportedModelError("its attention is causal, and has biases of scores by relative positions")
        if is_causal is not None and is_causal != causal:
            raise UnsupportedModelError("its attention is not causal, or its mask is made in an unsupported way")
        if sliding_window is not None and sliding_window != window:
            raise UnsupportedModelError(f"its sliding window is {sliding_window}, but its mask has {window}")
        window = own_window or window  # own_window: the module's window, in addition to a causal mask
        self.modules[layer] = module
        num_kv_heads, head_dim = key.shape[1], max(key.shape[-1], value.shape[-1])
        if latent_dim:
            num_kv_heads, head_dim = 1, latent_dim + self.expansions[module].rotated.shape[-1]
            of_latents = latent_dim, key.shape[-1], value.shape[-1]
        same = (other for other, (its_key, its_value) in self.kv.items() if key is its_key and value is its_value)
        kv_layer = next(same, None)
        if kv_layer is None:
            self.kv[layer] = key, value
        sizes = query.shape[1], num_kv_heads, head_dim
        self.calls[layer] = LayerShape(
            *(*sizes, window, softcap or 0.0, s_aux is not None, causal, *of_latents, kv_layer, linear_bias),
            0 if biases_HW is None else biases_HW.shape[1],
        )
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


class _Recurrences:
    """Implements recurrence.Functions without computing: records the states that the model's recurrences need."""

    def __init__(self, paths: Mapping[nn.Module, str]) -> None:
        self.module: Any = None
        self.states: dict[str, RowState] = {}
        self.layers: set[int] = set()
        self._paths = paths

    def convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"its convolutions over tokens end in {activation}")
        num_channels, width = weight.shape
        self._add(CONV_STATE, (num_channels, width - 1), hidden_states.dtype, others)
        return torch.empty_like(hidden_states)

    def apply_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        num_decays = 1 if g.dim() == 3 else key.shape[3]
        if g.shape != (value.shape[:3] if g.dim() == 3 else (*value.shape[:3], num_decays)):
            raise UnsupportedModelError("its delta rule has decays neither by head nor by element of a key")
        shape = value.shape[2], key.shape[3], value.shape[3]
        self._add(MATRIX_STATE, shape, torch.float32, others, num_decays, key.shape[2])
        return torch.empty_like(value), None

    def scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
        **others: Any,
    ) -> torch.Tensor:
        if not dt_softplus:
            raise UnsupportedModelError("its state space models have step sizes without a softplus")
        shape = hidden_states.shape[2], B.shape[3], hidden_states.shape[3]
        self._add(MATRIX_STATE, shape, torch.float32, others, num_groups=B.shape[2])
        return torch.empty_like(hidden_states)

    def _add(
        self,
        kind: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        others: Mapping[str, Any],
        num_decays: int = 1,
        num_groups: int = 0,
    ) -> None:
        strange = [name for name, given in others.items() if given and name not in _WITHOUT_EFFECT]
        if strange:
            raise UnsupportedModelError(f"its recurrences take {', '.join(strange)}")
        layer, name = getattr(self.module, "layer_idx", None), f"{self._paths[self.module]}.{kind}"
        if not isinstance(layer, int) or name in self.states:
            raise UnsupportedModelError("its recurrences run several times, or outside of layers")
        self.layers.add(layer)
        dtype_name = str(dtype).removeprefix("torch.")
        self.states[name] = RowState(name, shape, dtype_name, num_decays=num_decays, num_groups=num_groups)


def observe(model: PreTrainedModel, num_layers: int, *, encodes: bool = False) -> Observation:
    """Run a transformers model on the meta device, and return how its layers attend and which layers are equal.

    num_layers: of the decoder or encoder. encodes: whether the model is an encoder, whose forward takes no cache.
    Raises UnsupportedModelError for features that the engine lacks.
    """
    observer = _Observer()
    AttentionInterface.register(_NAME, observer.attend)
    AttentionMaskInterface.register(_NAME, observer.mask)
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = _NAME
    path, layers = _layers(model, num_layers)
    paths = {module: path for path, module in recurrent_modules(model)}
    recurrences = _Recurrences(paths)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    # In families with recurrences transformers reads the mask's values, so it cannot be on the meta device.
    mask = torch.ones(1, _TOKENS, dtype=torch.int64, device="cpu" if has_recurrent_family(model) else "meta")
    try:
        options = {} if encodes else {"use_cache": False}
        with (
            torch.no_grad(),
            functions_used(model, recurrences),
            expansions_recorded(model) as observer.expansions,
            _watched(observer, layers),
            observer,
        ):
            model(input_ids=ids, position_ids=ids.clone(), attention_mask=mask, **options)
    finally:
        config._attn_implementation = before
    if not observer.calls and recurrences.layers:
        raise UnsupportedModelError("its layers have recurrences alone; at least one must attend")
    if not observer.calls:
        raise UnsupportedModelError("its layers do not attend through transformers' AttentionInterface")
    found = observer.calls.keys() | recurrences.layers
    types = getattr(config, "layer_types", None) or ()
    by_token = (number for number, kind in enumerate(types) if kind in _BY_TOKEN)
    found |= {number for number in by_token if not _is_numbered_within(layers, number)}
    unused = {number for number in range(len(layers)) if number not in observer.ops}  # only for images (Mllama)
    found |= unused
    if unused:
        path = ""  # the others may be known by their numbers
    if sorted(found) != list(range(num_layers)):
        missing = [layer for layer in range(num_layers) if layer not in found]
        which = f"its layers {missing}" if len(missing) < num_layers else "its layers"
        raise UnsupportedModelError(f"{which} do not attend through transformers' AttentionInterface")
    attention = tuple(observer.calls.get(layer, _NO_ATTENTION) for layer in range(num_layers))
    if len({layer.causal for layer in attention}) > 1:
        raise UnsupportedModelError("some of its layers attend in both directions, others do not")
    signatures = tuple(hash(repr(observer.ops.get(number))) for number in range(num_layers))
    modules = tuple(observer.modules[layer] for layer in sorted(observer.modules))
    states = tuple(recurrences.states.values())
    return Observation(attention, modules, states, path, signatures, observer.in_tuple)


def _is_numbered_within(layers: nn.ModuleList, number: int) -> bool:
    """Return whether a submodule of the layer `number` has a layer number, as modules with a cache do.

    Returns True if the model's layers are not known.
    """
    return not len(layers) or any(hasattr(part, "layer_idx") for part in [*layers[number].modules()][1:])


def _layers(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    found = [
        (path, module)
        for path, module in model.named_modules()
        if type(module) is nn.ModuleList and len(module) == num_layers and path.count(".") <= 2
    ]
    return found[0] if len(found) == 1 else ("", nn.ModuleList())


@contextmanager
def _watched(observer: _Observer, layers: nn.ModuleList) -> Iterator[None]:
    observer.parameters_of(layers)

    def entered(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
            observer.enter(number, arguments[0] if arguments else keywords.get("hidden_states"))

        return hook

    def left(module: nn.Module, arguments: Any, result: Any) -> None:
        observer.layer, observer.in_tuple = None, isinstance(result, tuple)

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.callback(layer.register_forward_pre_hook(entered(number), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(left).remove)
        yield


def _sight_of(mask_function: Callable[..., Any]) -> tuple[int | None, bool]:
    """Return a mask's sliding window in keys (None: no window), and whether the mask is causal.

    Raises UnsupportedModelError for a mask that a window and causality do not describe.
    """
    keys = torch.arange(_POSITIONS + 2)

    def seen_by(query: int) -> torch.Tensor:
        return mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(query), keys).expand(keys.shape)

    seen = seen_by(_POSITIONS)
    hidden, causal = int((~seen[:_POSITIONS]).sum()), not bool(seen[-1])
    window = None if not hidden else _POSITIONS + 1 - hidden
    for query in (_POSITIONS, _POSITIONS - 1, _POSITIONS * 2 // 3, (window or 0) // 2, 0):
        far = window or _POSITIONS + 2
        expected = (keys > query - far) & (keys < query + (1 if causal else far))
        if not torch.equal(seen_by(query), expected):
            raise UnsupportedModelError("its mask is neither causal nor causal with a sliding window")
    return window, causal
