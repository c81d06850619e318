"""Values become JSON and tensors and come back exactly; the files are what the safetensors package reads."""

import json
import math
import random
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.checkpoint import NotSaved, digest, export_weights, rng_state, set_rng_state
from paceline.checkpoint.state import HostCopy
from paceline.errors import UsageError
from paceline.stored.json_tree import NATIVE, Encoder, decode
from paceline.stored.packed import pack, unpack
from paceline.stored.tensor_file import TensorFile
from tests.models import mlp


def there_and_back(value: Any) -> Any:
    blob = pack(value, "value")
    return unpack(torch.frombuffer(bytearray(blob), dtype=torch.uint8))


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return digest_of(one) == digest_of(other)
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    if isinstance(one, float):
        return bool(one.hex() == other.hex())
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def digest_of(tensor: torch.Tensor) -> str:
    return digest(None, None, 0, tensor)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner) | st.dictionaries(st.just("$"), inner)
    ),
    max_leaves=12,
)


@given(values)
def test_plain_values_come_back_exactly(value: Any) -> None:
    assert same(there_and_back(value), value) or "nan" in repr(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 5e-324, 0.1, 1e308, 2**70, -(2**70)])
def test_numbers_at_the_edge(value: float) -> None:
    assert same(there_and_back(value), value)
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back(-(2**20000)) == -(2**20000)


def test_rare_kinds_come_back_as_they_were() -> None:
    value = {
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "counter": Counter([3, 3, 9]),
        "set": {3, 1},
        "frozen": frozenset({"x"}),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        7: {(1, "a"): [None]},
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "scalar": np.float32(0.1),
        "empty": [{}, [], (), torch.empty(0, 3), ""],
    }
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("dtype", [*NATIVE, torch.complex128, torch.float8_e4m3fnuz], ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(2, 3)
    for value in (tensor, tensor.t(), tensor[:, 1], tensor[0, 0]):
        back = there_and_back([value])[0]
        assert back.dtype == dtype and back.shape == value.shape
        assert back.contiguous().view(-1).view(torch.uint8).equal(value.contiguous().view(-1).view(torch.uint8))


def test_a_tensor_that_occurs_twice_is_kept_once_and_is_one_again() -> None:
    shared = torch.arange(3.0)
    encoder = Encoder()
    tree = encoder.encode({"a": shared, "b": [shared], "view": shared[1:]})
    assert list(encoder.tensors) == ["a", "view"]
    back = decode(json.loads(json.dumps(tree)), encoder.tensors.__getitem__)
    assert back["a"] is back["b"][0]


def test_lazily_conjugated_tensors_are_kept_as_they_look() -> None:
    for dtype in (torch.complex64, torch.complex128):
        value = torch.tensor([1 + 2j, 3 - 4j], dtype=dtype)
        back = there_and_back([value, value.conj(), value.conj().imag])
        assert torch.equal(back[0], value)
        assert torch.equal(back[1], value.conj().resolve_conj())
        assert torch.equal(back[2], torch.tensor([-2.0, 4.0], dtype=back[2].dtype))


class Fleeting:
    """A state_dict() of tensors that nobody else holds, in memory that is used again at once."""

    def state_dict(self) -> dict[str, Any]:
        return {str(index): torch.full((64,), index, dtype=torch.complex128) for index in range(50)}


def test_tensors_that_are_made_on_the_way_are_not_taken_for_one_another() -> None:
    back = there_and_back([Fleeting().state_dict(), Fleeting().state_dict()])
    assert all(part[str(index)][5] == index for part in back for index in range(50))


def test_names_that_would_collide_are_told_apart() -> None:
    value = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.ones(2), "": torch.ones(3)}
    assert same(there_and_back(value), value)


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [object(), Pair(1, 2), lambda: 0, torch.ones(2, 2).to_sparse(), torch.ones(1, device="meta"), np.array(["x"])],
    ids=["object", "namedtuple", "function", "sparse", "meta", "numpy text"],
)
def test_what_cannot_be_kept_is_refused_by_its_path(value: object) -> None:
    with pytest.raises(UsageError, match=r"loader\.inner\.0 cannot be stored: expected .*, got a"):
        Encoder().encode({"inner": [value]}, ("loader",))


def test_the_safetensors_package_reads_our_file_and_we_read_its(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "half": torch.randn(3, dtype=torch.float16),
        "wide": torch.randn(2, 2, dtype=torch.float64),
        "flag": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
        "number": torch.tensor(7),
        "café/.$": torch.randn(5).bfloat16(),
        "turned": torch.randn(3, 4).t(),
    }
    staging = HostCopy()
    staging.take(tensors)
    ours = b"".join(staging.parts())
    (tmp_path / "ours").write_bytes(ours)
    for name, value in safetensors.torch.load_file(tmp_path / "ours").items():
        assert same(value, tensors[name].contiguous())
    theirs = safetensors.torch.save({name: value.contiguous() for name, value in tensors.items()})
    read = TensorFile(torch.frombuffer(bytearray(theirs), dtype=torch.uint8))
    for name, value in tensors.items():
        assert same(read[name], value.contiguous())
        assert read[name].data_ptr() % 64 == 0 or not value.numel()


def framed(header: str, size: int) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + b"\0" * size


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00" * 7,
        b"\xff" * 8 + b"{}",
        framed("[]", 0),
        framed("{x", 0),
        framed('{"a": 1}', 4),
        framed('{"a": {}}', 4),
        framed('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 3),
        framed('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 8),
        framed('{"a":{"dtype":"X32","shape":[1],"data_offsets":[0,4]}}', 4),
        framed('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}', 4),
    ],
)
def test_what_is_not_in_the_format_is_an_error(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whoever reads a snapshot says which file it was
        TensorFile(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_exported_weights_load_into_the_bare_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    wrapped = torch.compile(model, backend="eager")
    assert isinstance(wrapped, nn.Module)
    path = export_weights(wrapped, tmp_path / "new" / "weights.safetensors")
    export_weights(model, path)  # a second time, over the first
    other = Tied()
    other.load_state_dict(safetensors.torch.load_file(path))
    assert digest(other, None, 0) == digest(model, None, 0)
    assert [entry.name for entry in path.parent.iterdir()] == ["weights.safetensors"]
    with pytest.raises(NotSaved, match=r"the weights could not be written to .*: \[Errno 17\] File exists"):
        export_weights(model, path / "below a file")


def test_the_digest_sees_every_part() -> None:
    torch.manual_seed(0)
    model = mlp(3, 4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    seen = {digest(model, optimizer, 1, {"epoch": 0}), digest(model, optimizer, 2, {"epoch": 0})}
    seen.add(digest(model, optimizer, 1, {"epoch": 1}))
    optimizer.state_dict()["state"][0]["exp_avg"].view(-1)[0] += 1e-3
    seen.add(digest(model, optimizer, 1, {"epoch": 0}))
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    seen.add(digest(model, optimizer, 1, {"epoch": 0}))
    optimizer.param_groups[0]["lr"] *= 2
    seen.add(digest(model, optimizer, 1, {"epoch": 0}))
    assert len(seen) == 6
    assert digest(model, optimizer, 1, {"epoch": 0}) in seen, "the same state has the same digest"
    assert {len(one) for one in seen} == {64}


def test_the_digest_does_not_know_the_order_of_dicts() -> None:
    assert digest(None, None, 0, {"a": 1, "b": torch.ones(1)}) == digest(None, None, 0, {"b": torch.ones(1), "a": 1})


def test_generators_continue_where_their_state_was_taken() -> None:
    state = there_and_back(rng_state())
    expected = (random.random(), torch.rand(3).tolist(), np.random.random())
    set_rng_state(state)
    assert (random.random(), torch.rand(3).tolist(), np.random.random()) == expected
