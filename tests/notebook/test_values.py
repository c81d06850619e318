"""Values arrive as they were sent, through the very messages that jupyter sends."""

import json
import math
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import json_packer, json_unpacker
from torch import nn

from paceline.errors import UsageError
from paceline.notebook.values import pack, unpack


def there_and_back(value: Any) -> Any:
    content, buffers = pack(value, "x")
    return unpack(json_unpacker(json_packer(content)), [memoryview(buffer) for buffer in buffers])  # type: ignore[misc]


def bits(value: Any) -> Any:
    """What must not change, of everything that == is too kind to."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return "tensor", value.dtype, value.shape, bytes(plain.view(-1).view(torch.uint8).tolist())
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, float):
        return type(value), struct.pack(">d", math.nan if math.isnan(value) else value)  # NaN is NaN
    if isinstance(value, complex):
        return complex, bits(value.real), bits(value.imag)
    if isinstance(value, dict):
        return type(value), [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted((bits(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    return type(value), value


DOUBLES = st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0])
PLAIN = (
    (st.none() | st.booleans() | st.integers() | st.floats() | DOUBLES | st.binary() | st.complex_numbers())
    | st.text(st.characters())  # halves of surrogate pairs too
    | st.integers(2**60, 2**70)
)
KEYS = st.text(st.characters()) | st.just("$") | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict)
        | st.sets(PLAIN)
        | st.frozensets(PLAIN)
    ),
    max_leaves=15,
)


@given(VALUES)
def test_values_arrive_as_they_were(value: Any) -> None:
    assert bits(there_and_back(value)) == bits(value)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@given(st.sampled_from(DTYPES), SHAPES, st.data())
def test_tensors_keep_their_bits(dtype: torch.dtype, shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape) * dtype.itemsize
    raw = data.draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone() if size else torch.empty(0, dtype=torch.uint8)
    value = flat.view(dtype).view(shape)
    back = there_and_back(value)
    assert bits(back) == bits(value)
    assert bits(there_and_back(value.transpose(0, -1) if shape else value)) == bits(
        value.transpose(0, -1) if shape else value
    )
    back.zero_()  # memory of its own, which can be written
    assert bits(value)[-1] == raw


def test_views_and_other_forms_of_tensors() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    for value in (base[:, ::2, 1:], base.expand(5, 2, 3, 4), base.permute(2, 0, 1), base[0, 0, 0], base[:, :0]):
        back = there_and_back(value)
        assert torch.equal(back, value) and back.shape == value.shape and back.is_contiguous()
    wave = torch.tensor([1 + 2j, -3j])
    assert torch.equal(there_and_back(wave.conj()), wave.conj())
    assert torch.equal(there_and_back(wave.conj().imag), wave.conj().imag)
    weight = nn.Parameter(torch.ones(2))
    back = there_and_back([weight, weight * 2])
    assert type(back[0]) is torch.Tensor and not back[0].requires_grad
    assert back[1].tolist() == [2.0, 2.0] and back[1].grad_fn is None


def test_a_tied_weight_travels_once_and_arrives_as_one() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    state = nn.Sequential(first, second).state_dict()
    content, buffers = pack(state, "state")
    assert len(buffers) == 3
    back: Any = unpack(content, buffers)
    assert list(back) == list(state) and type(back) is OrderedDict
    assert back["0.weight"] is back["1.weight"] and back["0.bias"] is not back["1.bias"]
    # Equal places in memory are not enough to be one.
    grid = torch.arange(4.0).view(2, 2)
    back = there_and_back([grid, grid.T, grid[0]])
    assert [item.tolist() for item in back] == [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [0, 1]]


def test_values_of_torch_and_counters() -> None:
    value = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "shape": torch.Size([2, 0]),
        "count": Counter("aab"),
        "bytes": bytearray(b"ab"),
        1: (None, [True, ()]),
    }
    assert bits(there_and_back(value)) == bits(value)


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(10)[::3],
    np.array(1.5),
    np.array([]),
    np.zeros((2, 0), np.float16),
    np.array([np.nan, -0.0, np.inf], ">f4"),
    np.array([True, False]),
    np.array([1j]),
    np.array(["a", "längst"]),
    np.array([b"a\0b"]),
    np.array(["2026-01-01"], "datetime64[ns]"),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    np.float32(0.1),
    np.float64(0.1),
    np.int8(-3),
    np.bool_(True),
    np.complex64(1j),
    np.str_("x"),
    np.datetime64("2026-01-01"),
    np.longdouble(1) / 3,
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{value.dtype}")
def test_arrays_and_scalars_of_numpy(value: Any) -> None:
    back = there_and_back(value)
    assert bits(back) == bits(value) and type(back) is type(value)
    if isinstance(back, np.ndarray):
        assert back.flags.writeable and np.isfortran(back) == np.isfortran(value)


def looped() -> list[Any]:
    value: list[Any] = [1]
    value.append({"me": value})
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "place", "got"),
    [
        (object(), "x", "a builtins.object"),
        ([1, {"a": (2, print)}], "x.1.a.1", "a builtins.builtin_function_or_method"),
        ({"net": nn.Linear(1, 1)}, "x.net", "a torch.nn.modules.linear.Linear"),
        ({(1, 2): range(3)}, "x.(1, 2)", "a builtins.range"),
        ({range(3): 1}, "x.key", "a builtins.range"),
        ({Path()}, "x.0", "a pathlib.PosixPath"),
        (Point(1, 2), "x", "Point"),
        (defaultdict(list), "x", "a collections.defaultdict"),
        (np.array([object()]), "x", "a numpy value of dtype object"),
        (np.ma.masked_array([1, 2], [True, False]), "x", "MaskedArray"),
        (torch.eye(2).to_sparse(), "x", "a Tensor of layout torch.sparse_coo on cpu, not dense"),
        ([torch.empty(2, device="meta")], "x.0", "a Tensor of layout torch.strided on meta, not dense"),
        (looped(), "x.1.me", "something that contains itself"),
        (deep(), "x" + ".0" * 64, "values nested more than 64 deep"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, place: str, got: str) -> None:
    with pytest.raises(UsageError) as caught:
        pack(value, "x")
    assert str(caught.value).startswith(f"{place} cannot be sent between the notebook and the ranks: expected ")
    assert got in str(caught.value)


def test_the_same_value_twice_is_no_loop() -> None:
    inner = [1]
    assert there_and_back([inner, inner, {"a": inner}]) == [[1], [1], {"a": [1]}]


TENSOR = {"$": "tensor", "dtype": "float32", "shape": [2], "buffer": 0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "not a packed value: KeyError"),
        ({"value": {"$": "pickle", "value": "x"}}, "unknown kind 'pickle'"),
        ({"value": {"$": "pickle", "buffer": 0}}, "unknown kind 'pickle'"),
        ({"value": {"$": "array", "buffer": 3}}, "something else: IndexError"),
        ({"value": {"$": "dict", "items": 3}}, "something else: TypeError"),
        ({"value": {"$": "float", "value": "x"}}, "could not convert string to float"),
        ({"value": TENSOR | {"dtype": "load"}}, "no dtype 'load'"),
        ({"value": TENSOR | {"shape": [3]}}, r"8 bytes cannot be a tensor of float32 and shape \(3,\)"),
        ({"value": {"$": "array", "buffer": 0}}, "magic string"),
    ],
)
def test_what_was_not_packed_is_refused(content: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        unpack(content, [b"12345678"])


def test_plain_values_do_not_load_torch_or_numpy() -> None:
    code = (
        "import sys, json\n"
        "from paceline.notebook import values\n"
        "from paceline.notebook import cell_parts, rank_selection\n"
        "content, buffers = values.pack({'a': [1, 2.5, 'x', b'y', (None, {3})]}, 'x')\n"
        "assert values.unpack(content, buffers) == {'a': [1, 2.5, 'x', b'y', (None, {3})]}\n"
        "cell_parts.split('x = 1'); rank_selection.parse_ranks('0', 2)\n"
        "print(json.dumps([name for name in ('torch', 'numpy') if name in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
