# SPDX-License-Identifier: Apache-2.0
"""Where an array lies, whatever library made it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nccl_m2n import Layout, LayoutError, LocalTransport, Mesh, Replicate, Transfer, plan
from nccl_m2n.execution.given import Given
from nccl_m2n.execution.memory import as_array
from nccl_m2n.execution.views import ArrayView, contiguous_strides, view_array


class Interface:
    """Has nothing but NumPy's array interface."""

    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = array.__array_interface__
        self.array = array


class Dlpack:
    """Has nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


BASE = np.arange(24, dtype="int16").reshape(4, 6)


@pytest.mark.parametrize("make", [lambda a: a, Interface, Dlpack], ids=["numpy", "interface", "dlpack"])
@pytest.mark.parametrize("index", [..., (slice(None), slice(None, None, 2)), (slice(1, 3), slice(2, 5))])
def test_strided_arrays(make, index: Any) -> None:
    for array in (BASE[index], BASE[index].T):
        view = view_array(make(array))
        assert (view.pointer, view.shape, view.strides) == (array.ctypes.data, array.shape, array.strides)
        assert (view.dtype, view.device, view.writable) == ("int16", False, True)
        assert view.size == array.size
        assert view.span == np.lib.array_utils.byte_bounds(array)


def test_backwards() -> None:
    array = BASE[::-1, ::-2]
    view = view_array(array)
    assert view.strides == (-12, -4)
    assert view.span == np.lib.array_utils.byte_bounds(array)


def test_extended_types() -> None:
    assert view_array(np.zeros(3, ml_dtypes.bfloat16)).dtype == "bfloat16"
    assert view_array(np.zeros(3, ml_dtypes.float8_e4m3fn)).dtype == "float8_e4m3fn"


def test_read_only() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert not view_array(array).writable
    assert not view_array(Interface(array)).writable


def test_scalars_and_nothing() -> None:
    assert view_array(np.float32(3)[...]).shape == ()
    empty = view_array(np.zeros((0, 3)))
    assert empty.size == 0
    assert empty.span[0] == empty.span[1]


def test_a_view_is_taken_as_it_is() -> None:
    view = ArrayView(4096, (2, 3), contiguous_strides((2, 3), 4), "float32")
    assert view_array(view) is view
    assert view.strides == (12, 4)
    assert view.span == (4096, 4096 + 24)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(24, dtype=torch.int16).reshape(4, 6)[:, ::2].T
    view = view_array(tensor)
    assert (view.pointer, view.shape, view.strides) == (tensor.data_ptr(), (3, 4), (4, 12))
    assert (view.device, view.gpu, view.writable) == (False, None, True)
    for name in ("bfloat16", "float8_e4m3fn", "complex32", "bool"):
        assert view_array(torch.zeros(2, dtype=getattr(torch, name))).dtype == name
    assert view_array(torch.nn.Parameter(torch.zeros(2))).shape == (2,)
    assert view_array(Dlpack(torch.zeros(2, 3, dtype=torch.bfloat16).T)).strides == (2, 6)


def lazily_conjugated(torch: Any) -> Any:
    return torch.zeros(2, dtype=torch.complex64).conj()


def fake(torch: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(2)


def freed(torch: Any) -> Any:
    tensor = torch.zeros(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def inside(transform: str) -> Callable[[Any], Any]:
    """A tensor as a function sees it that a transform of torch.func traces."""

    def make(torch: Any) -> Any:
        kept = []
        getattr(torch.func, transform)(lambda t: (kept.append(t), t.sum())[1])(torch.zeros(2))
        return kept[0]

    return make


@pytest.mark.filterwarnings("ignore")  # what is deprecated or a prototype is refused all the same
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda torch: torch.zeros(2, device="meta"), "CPU or a CUDA device, got one on meta"),
        (fake, "CPU or a CUDA device, got one on no device: it is fake"),
        (lazily_conjugated, r"a lazily conjugated one; pass tensor\.resolve_conj"),
        (lambda torch: lazily_conjugated(torch).imag, r"a lazily negative one; pass tensor\.resolve_neg"),
        (lambda torch: torch._efficientzerotensor(2), "zeros without memory"),
        (lambda torch: torch.zeros(2, 2).to_sparse(), r"layout torch\.sparse_coo"),
        (lambda torch: torch.zeros(2, 2).to_sparse_csr(), r"layout torch\.sparse_csr"),
        (lambda torch: torch.zeros(2).to_mkldnn(), r"layout torch\._mkldnn"),
        (lambda torch: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "a quantised one"),
        (lambda torch: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "a nested one"),
        (
            lambda torch: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
            "a NestedTensor, which is made of several",
        ),
        (freed, r"an array in memory, got torch\.Tensor without any"),
        (lambda torch: torch.nn.LazyLinear(2).weight, "memory can be seen, got .*UninitializedParameter"),
        (inside("grad"), "an array|a tensor"),
        (inside("vmap"), "an array|a tensor"),
        (lambda torch: torch.empty(2, dtype=torch.int3), "an element type"),
    ],
)
def test_tensors_whose_values_are_not_their_memory(make: Callable[[Any], Any], message: str) -> None:
    torch = pytest.importorskip("torch")
    try:
        tensor = make(torch)
    except (AttributeError, RuntimeError, NotImplementedError, ImportError) as error:
        pytest.skip(f"this PyTorch does not make one: {error}")
    with pytest.raises(LayoutError, match=f"expected {message}|{message}"):
        view_array(tensor)


def test_a_dtensor_is_refused() -> None:
    class Fake:
        data_ptr = element_size = to_local = None

    with pytest.raises(
        LayoutError, match=r"expected this rank's local tensor, got a DTensor; pass tensor.to_local"
    ):
        view_array(Fake())


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(2, ">f4"), r"this machine's byte order, got dtype\('>f4'\); pass array\.astype\("),
        (np.zeros(2, ">M8[s]"), "this machine's byte order"),
        (np.zeros(2, [("a", "u1"), ("b", ">i2")]), "this machine's byte order"),
        (Interface(np.zeros(2, ">f4")), "this machine's byte order"),
        (np.ma.array([1, 2], mask=[0, 1]), r"without a mask.*pass array\.filled\(\) or array\.data"),
        (np.ma.array([1, 2]), "without a mask"),
        (np.array([{}]), "Python objects cannot be moved"),
        (
            np.array(["long enough to lie elsewhere"], np.dtypes.StringDType()),
            "Python objects cannot be moved",
        ),
        (ArrayView(0, (2,), (4,), "float32"), "an array in memory, got .*ArrayView without any"),
        (ArrayView(4096, (2, 2), (4,), "float32"), "a stride for each extent"),
        (ArrayView(4096, (-1,), (4,), "float32"), "integers of 0 or more as the shape of a view"),
    ],
)
def test_arrays_whose_values_are_not_their_memory(array: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        view_array(array)


def test_masked_by_its_interface() -> None:
    class Masked:
        __array_interface__ = BASE.__array_interface__ | {"mask": BASE}
        __cuda_array_interface__: dict[str, Any]

    with pytest.raises(LayoutError, match="without a mask"):
        view_array(Masked())
    Masked.__cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (4096, False), "mask": BASE}
    with pytest.raises(LayoutError, match="without a mask"):
        view_array(Masked())


def test_what_numpy_would_copy_cannot_be_written() -> None:
    assert not view_array(np.float32(3)).writable

    class Buffer:
        __array_interface__ = {"shape": (2,), "typestr": "|u1", "data": bytearray(b"ab"), "version": 3}  # noqa: RUF012

    view = view_array(Buffer())
    assert as_array(view).tolist() == [97, 98]
    assert not view.writable


class OldDlpack(Dlpack):
    """Written before DLPack had versions and flags."""

    def __dlpack__(self, stream: object = None) -> Any:
        return self.array.__dlpack__(stream=stream)


def test_dlpack_keeps_what_is_read_only() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert view_array(Dlpack(array)).writable
    old = view_array(OldDlpack(array))
    assert not old.writable  # it cannot say
    assert np.array_equal(as_array(old), array)
    array.flags.writeable = False
    assert not view_array(Dlpack(array)).writable


def test_dlpack_keeps_its_memory() -> None:
    view = view_array(Dlpack(np.full(1 << 16, 7.0)))  # freed, if nobody held the capsule or the array
    junk = [np.zeros(1 << 16) for _ in range(4)]
    assert (as_array(view) == 7).all()
    assert len(junk) == 4


@pytest.fixture
def jnp() -> Any:
    pytest.importorskip("jax")
    import jax.numpy

    return jax.numpy


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float32", "bool", "int8", "complex64"],
)
def test_jax_arrays(jnp: Any, dtype: str) -> None:
    array = jnp.arange(6).reshape(2, 3).astype(dtype)
    for each in (array, array.T):
        view = view_array(each)
        assert (view.dtype, view.shape, view.writable) == (dtype, each.shape, False)
        assert as_array(view).tobytes() == np.asarray(each).tobytes()


def test_jax_arrays_that_are_not_there(jnp: Any) -> None:
    import jax

    for dtype in ("int4", "float4_e2m1fn"):  # packed, or not, as XLA likes
        with pytest.raises(LayoutError):
            view_array(jnp.zeros(2, dtype))
    with pytest.raises(LayoutError, match="expected an array .*PRNGKeyArray"):
        view_array(jax.random.key(0))
    traced: list[Any] = []
    jax.jit(lambda x: (traced.append(x), x)[1])(jnp.zeros(2))
    with pytest.raises(LayoutError, match="expected an array .*Tracer"):
        view_array(traced[0])
    gone = jnp.zeros(2)
    gone.delete()
    with pytest.raises(LayoutError, match="deleted"):
        view_array(gone)


def test_a_jax_array_on_several_devices(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    script = tmp_path / "sharded.py"
    script.write_text(
        """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nccl_m2n import LayoutError
from nccl_m2n.execution.views import view_array
mesh = Mesh(jax.devices(), "x")
for spec in (PartitionSpec("x"), PartitionSpec()):
    array = jax.device_put(jax.numpy.arange(8), NamedSharding(mesh, spec))
    try:
        view_array(array)
    except LayoutError as error:
        assert "a JAX array on 2 devices; pass array.addressable_shards[i].data" in str(error), error
    else:
        raise SystemExit("taken")
    assert view_array(array.addressable_shards[1].data).shape == ((4,) if spec else (8,))
""",
        encoding="utf-8",
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize("side", ["source", "destination"])
def test_errors_name_the_tensor(jnp: Any, side: str) -> None:
    """Never `RuntimeError`, and the destination of what cannot be written is refused."""
    layout = Layout((2, 3), Mesh([0]), [Replicate()])
    other = Layout((2, 3), Mesh([1]), [Replicate()])
    given = [
        {"w": {0: np.zeros((2, 3), ml_dtypes.bfloat16)}},
        {"w": {1: np.zeros((2, 3), ml_dtypes.bfloat16)}},
    ]
    made = plan(Transfer(layout, other, "bfloat16", "w"))
    at = int(side == "destination")
    given[at]["w"][at] = np.zeros((2, 3), ">u2")
    with pytest.raises(LayoutError, match=rf"rank {at}: tensor 'w', {side} array: expected .*byte order"):
        made.bind(LocalTransport(2), *given)
    given[at]["w"][at] = jnp.full((2, 3), 5, "bfloat16")
    if side == "destination":
        with pytest.raises(LayoutError, match=r"rank 1: tensor 'w', destination array: expected a writable"):
            made.bind(LocalTransport(2), *given)
        return
    with made.bind(LocalTransport(2), *given) as bound:
        bound.run()
    assert (given[1]["w"][1] == 5).all()


@pytest.mark.parametrize("given", [[1, 2], None, 3, "abc", b"abc"])
def test_what_is_no_array(given: object) -> None:
    with pytest.raises(LayoutError, match=rf"expected an array \(NumPy, .*\), got {type(given).__name__}"):
        view_array(given)


def test_device_memory() -> None:
    class OnDevice:
        __cuda_array_interface__ = {"shape": (2, 3), "typestr": "<f4", "data": (4096, True), "version": 3}  # noqa: RUF012

    view = view_array(OnDevice())
    assert (view.pointer, view.strides, view.device, view.writable) == (4096, (12, 4), True, False)


def test_which_gpu_an_array_is_on() -> None:
    class Device:
        id = 3

    class OnDevice:
        __cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012
        device = Device()

    assert view_array(OnDevice()).gpu == 3


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (ArrayView(4096, (2, 3), (12, 4), "float32", gpu=1), "on GPU 0, which is rank 0's, got one on GPU 1"),
        (
            ArrayView(4096, (2, 3), (12, 4), "float32", device=False),
            "in device memory, .*got one in host memory",
        ),
        (ArrayView(4098, (2, 3), (12, 4), "float32", gpu=0), "multiples of their size"),
        (ArrayView(4096, (2, 3), (14, 4), "float32", gpu=0), "multiples of their size"),
    ],
)
def test_what_a_gpus_rank_takes(view: ArrayView, message: str) -> None:
    layout = Layout((2, 3), Mesh([0]), [Replicate()])
    made = plan(Transfer(layout, layout, "float32", "w", "bfloat16"))
    with pytest.raises(LayoutError, match=rf"tensor 'w', source array: expected .*{message}"):
        Given(made, 0, "source", {"w": view}, 0)
    good = ArrayView(4100, (2, 3), (16, 4), "float32", gpu=0)
    assert list(Given(made, 0, "source", {"w": good}, 0).views.values()) == [good]
