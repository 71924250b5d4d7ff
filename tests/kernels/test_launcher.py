"""Quick launches hand the driver what Triton's own do, whatever the arguments; on a machine without a GPU, for one."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hopper import Hopper
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from triton.runtime.jit import JITFunction  # noqa: E402

from compiled_engine.kernels.boxes import Box  # noqa: E402
from compiled_engine.kernels.launcher import TRITON_VERSIONS, Launcher, quick_launches  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

MEMORY = torch.zeros(256, dtype=torch.int8)
DTYPES = (torch.float32, torch.bfloat16, torch.int32)
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 16, 17, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63]),
    st.integers(-(2**63), 2**64 - 1),
    st.booleans(),
    st.floats(allow_nan=False),
    st.none(),
)
GRIDS = st.lists(st.integers(1, 2**16), min_size=1, max_size=3).map(tuple)


@st.composite
def pointers(draw: st.DrawFn) -> torch.Tensor | None:
    """A part of MEMORY, starting at one of 64 places, or None."""
    start, dtype = draw(st.integers(0, 63)), draw(st.sampled_from(DTYPES))
    size = dtype.itemsize
    return None if draw(st.booleans()) and start < 8 else MEMORY[start * size : (start + 1) * size].view(dtype)


@st.composite
def launches(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Any], dict[str, Any]]:
    """Grid, arguments and keywords for `add_kernel`."""
    options = {
        "FLAG": st.booleans(),
        "num_warps": st.sampled_from([2, 4]),
        "launch_pdl": st.booleans(),
        "enable_fp_fusion": st.booleans(),
        "num_stages": st.sampled_from([2, 3]),
    }
    keywords = draw(st.fixed_dictionaries({"BLOCK": st.sampled_from([16, 32])}, optional=options))
    return draw(GRIDS), [*(draw(pointers()) for _ in range(3)), *(draw(NUMBERS) for _ in range(3))], keywords


def make_kernel() -> Any:
    @quick_launches
    @triton.jit(do_not_specialize=["loose"], do_not_specialize_on_alignment=["c_ptr", "wide"])
    def add_kernel(a_ptr, b_ptr, c_ptr, count, loose, wide, BLOCK: tl.constexpr, FLAG: tl.constexpr = False):  # type: ignore[no-untyped-def]
        index = tl.arange(0, BLOCK)
        value = tl.load(a_ptr + index, mask=index < count)
        if b_ptr is not None:
            value += tl.load(b_ptr + index, mask=index < loose)
        tl.store(c_ptr + index, value + wide if FLAG else value, mask=index < count)

    return add_kernel


class Recording(Hopper):
    """Records the arguments of each launch of a compiled kernel."""

    utils = SimpleNamespace(
        get_device_properties=Hopper.utils.get_device_properties,
        load_binary=cache(lambda name, binary, shared, device: (None, object(), 32, 0, 1024)),
    )

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.stream = 7

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launches.append(arguments)

    def get_current_stream(self, device: int) -> int:
        return self.stream


@pytest.fixture
def recording(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    driver = Recording()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return driver


def addresses(launch: tuple[Any, ...]) -> list[Any]:
    """Grid, stream, function, metadata and arguments, as the driver sees them; without the hooks' three."""
    values = [*launch[:6], *launch[9:]]
    return [value.data_ptr() if isinstance(value, torch.Tensor) else value or 0 for value in values]


def test_this_triton_is_known() -> None:
    """If this fails, run the tests with the new version in TRITON_VERSIONS."""
    assert triton.__version__.startswith(tuple(f"{version}." for version in TRITON_VERSIONS))
    assert isinstance(make_kernel(), Launcher)


def test_what_a_compiled_kernel_is_called_with() -> None:
    """By position: grid, stream, function; metadata, and None for hooks and what they are told; arguments."""
    from triton.backends.nvidia.driver import CudaLauncher

    names = list(inspect.signature(CudaLauncher.__call__).parameters)
    assert names[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    assert names[6:] in (
        ["args"],
        ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"],
    )


@given(st.lists(launches(), min_size=1, max_size=12))
def test_a_launch_takes_what_was_compiled_for_its_specialization(
    many: list[tuple[tuple[int, ...], list[Any], dict[str, Any]]],
) -> None:
    """Nothing is compiled: a kernel is represented by the specialization that Triton would compile."""
    kernel, called = make_kernel(), []
    jit_function = kernel.jit_function
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", Recording())
        binder = jit_function.device_caches[0][-1]

        def specialization(arguments: list[Any], keywords: dict[str, Any]) -> Any:
            return binder(*arguments, **keywords)[1:]

        def by_triton(*arguments: Any, grid: tuple[int, ...], warmup: bool, **keywords: Any) -> Any:
            called.append("triton")
            found = specialization(list(arguments), keywords)
            return SimpleNamespace(run=lambda *launch: called.append(launch), function=found, packed_metadata=None)

        patch.setattr(jit_function, "run", by_triton)
        for grid, arguments, keywords in many * 2:
            kernel[grid](*arguments, **keywords)
            if called[-1] != "triton":
                assert called[-1][:4] == (*grid, *(1, 1)[: 3 - len(grid)], 7)
                assert called[-1][4] == specialization(arguments, keywords)
                pointed = [0 if pointer is None else pointer.data_ptr() for pointer in arguments[:3]]
                values = [*pointed, *arguments[3:], keywords["BLOCK"], keywords.get("FLAG", False)]
                assert list(called[-1][5:]) == [None] * 4 + values
    # The second time all are known.
    assert "triton" not in called[len(many) :]


@pytest.mark.parametrize("b", [None, MEMORY[64:128]])
def test_the_driver_is_handed_what_triton_hands_it(b: torch.Tensor | None, recording: Recording) -> None:
    kernel = make_kernel()
    for offset, count, loose, grid in ((0, 1, 5, (3,)), (0, 32, 1, (3, 4)), (8, 33, 2, (3, 4, 5)), (0, 1, 16, (1,))):
        arguments = (MEMORY[offset : offset + 32], b, MEMORY[128 + offset :], count, loose, 3)
        for stream in (7, 8):
            recording.stream = stream
            recording.launches.clear()
            for launcher in (kernel, kernel, kernel.jit_function):
                launcher[grid](*arguments, BLOCK=32, FLAG=True, num_warps=2)
            first, ours, tritons = map(addresses, recording.launches)
            assert first == ours == tritons
            assert ours[3] == stream
    assert recording.launches[1][6:9] == (None, None, None)


def test_hooks_see_every_launch(recording: Recording) -> None:
    kernel, names = make_kernel(), []
    arguments = (MEMORY[:32], None, MEMORY[64:], 5, 5, 5)
    for _ in range(2):
        kernel[(1,)](*arguments, BLOCK=32)
    hook = lambda metadata: names.append(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        kernel[(1,)](*arguments, BLOCK=32)
        # The driver calls them, here the recording one, which does not: it is handed them.
        (enter,) = {launch[7] for launch in recording.launches[-1:]}
        enter(recording.launches[-1][6])
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert names == ["add_kernel"]
    kernel[(1,)](*arguments, BLOCK=32)
    assert recording.launches[-1][7] is None


def test_a_kernel_that_a_hook_keeps_from_compiling_is_asked_for_again(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, asked = make_kernel(), []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: asked.append(about["repr"]) or True)
    for _ in range(2):
        kernel[(1,)](MEMORY[:32], None, MEMORY[64:], 5, 5, 5, BLOCK=32)
    assert len(asked) == 2
    assert recording.launches == []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    kernel[(1,)](MEMORY[:32], None, MEMORY[64:], 5, 5, 5, BLOCK=32)
    assert len(recording.launches) == 1


def test_options_that_it_does_not_know_are_tritons(recording: Recording) -> None:
    kernel = make_kernel()
    for _ in range(2):
        kernel[(1,)](MEMORY[:32], None, MEMORY[64:], 5, 5, 5, BLOCK=32, num_ctas=1)
    assert len(recording.launches) == 2
    assert all(launch[7] is not None for launch in recording.launches)


def make_box_kernel() -> Any:
    gluon = pytest.importorskip("triton.experimental.gluon")
    gl = pytest.importorskip("triton.experimental.gluon.language")

    @quick_launches
    @gluon.jit
    def box_kernel(a_desc, b_desc, out_ptr, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]
        gl.store(out_ptr, BLOCK)

    return box_kernel


def boxes(count: int) -> list[Box]:
    layouts = pytest.importorskip("triton.experimental.gluon.language")
    layout = layouts.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return [Box((8 << number, 64), layout) for number in range(count)]


def test_launches_with_boxes_take_what_was_compiled_for_them(recording: Recording) -> None:
    """Each box and dtype is a specialization of its own; addresses and sizes of tensors are not."""
    kernel, (small, large) = make_box_kernel(), boxes(2)
    of_types = [torch.zeros(64, 128, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    given = [box.of(tensor, [64, 128], [128, 1]) for box in (small, large) for tensor in of_types]
    binder = kernel.jit_function.device_caches[0][-1]
    kinds = [(a, b) for a in given for b in (given[-1], None)]
    for a, b in kinds * 2:
        kernel[(1,)](a, b, MEMORY, BLOCK=8)
    launches, compiled = recording.launches, kernel.jit_function.device_caches[0][0]
    expected = {str(binder(a, b, MEMORY, BLOCK=8)[1:]) for a, b in kinds}
    assert len(compiled) == len(expected) == len(kinds)
    for first, again in zip(launches[: len(kinds)], launches[len(kinds) :], strict=True):
        assert first[4] is again[4]
        assert all(before is now for before, now in zip(first[9:11], again[9:11], strict=True))
    other = small.of(torch.zeros(32, 64, dtype=torch.bfloat16), [32, 64], [64, 1])
    kernel[(1,)](other, None, MEMORY, BLOCK=8)
    assert recording.launches[-1][9] is other
    assert len(compiled) == len(kinds)


def test_a_descriptor_of_a_box_is_that_of_triton() -> None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    (box,) = boxes(1)
    for size in (64, 32, 16):
        tensor = torch.zeros(size, 128, dtype=torch.bfloat16)
        found = box.of(tensor, [size, 128], [128, 1])
        expected = TensorDescriptor(tensor, [size, 128], [128, 1], found.block_shape, found.layout)
        assert type(found) is TensorDescriptor
        assert found.base is tensor
        assert found == expected
        assert found.box is box


def test_a_box_is_checked_where_it_is_first_used() -> None:
    (box,) = boxes(1)
    with pytest.raises(AssertionError):
        box.of(torch.zeros(64, 128, dtype=torch.bfloat16), [64, 128, 1], [128, 1])


def test_another_triton_launches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    assert isinstance(make_kernel(), JITFunction)


@pytest.mark.gpu
def test_on_the_device() -> None:
    """Alignment, numbers and optional tensors change from launch to launch; each is launched twice, and in a graph."""
    kernel = make_kernel()
    memory = torch.arange(512, dtype=torch.float32, device="cuda")
    for offset, count, loose, wide in ((0, 1, 5, 3), (1, 32, 1, 16), (4, 31, 2, 1), (0, 16, 16, 2**31 - 1)):
        for b in (None, memory[offset + 64 :]):
            a, results = memory[offset:], torch.zeros(3, 64, device="cuda")
            added = memory[offset + 64 : offset + 64 + 32] * (torch.arange(32, device="cuda") < loose)
            expected = torch.zeros(64, device="cuda")
            expected[:count] = (a[:32] + (0 if b is None else added) + wide)[:count]
            for result in results[:2]:
                kernel[(1,)](a, b, result, count, loose, wide, BLOCK=32, FLAG=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kernel[(1,)](a, b, results[2], count, loose, wide, BLOCK=32, FLAG=True)
            graph.replay()
            for result in results:
                assert torch.equal(result, expected)
