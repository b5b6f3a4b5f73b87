"""Tensor files: reading what was written, also with the safetensors package."""

from __future__ import annotations

import argparse
import functools
import random
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_ext.engine.checkpoint.file import (
    _DTYPE_NAMES,
    TensorFile,
    read_plain,
    write_plain,
    write_tensors,
)
from ds_ext.engine.recovery.slots import pack_state, unpack_state
from ds_ext.errors import CheckpointError, ConfigError


@pytest.mark.parametrize("dtype", _DTYPE_NAMES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_survives_a_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 6.0]])
    tensors = {"one": numbers.to(dtype), "other": torch.ones(5)}
    if dtype.is_complex:
        tensors["one"] = torch.complex(numbers, -numbers).to(dtype)
    write_tensors(tmp_path / "file", tensors)
    elements = TensorFile(tmp_path / "file").read("one", 1, 4)
    assert elements.dtype == dtype and elements.tolist() == tensors["one"].view(-1)[1:5].tolist()
    library = pytest.importorskip("safetensors.torch").load_file(tmp_path / "file")
    assert library["one"].dtype == dtype and library["one"].tolist() == tensors["one"].tolist()
    assert torch.equal(library["other"], tensors["other"])


@pytest.mark.parametrize(
    ("header", "error"),
    [
        (b"[1]", "invalid header: TypeError"),
        (b'{"a": 1}', "invalid header: TypeError"),
        (b'{"a": {"dtype": "U8", "data_offsets": [0, 0]}}', "invalid header: KeyError.'shape'"),
        (b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}', "2 bytes from 0 expected"),
        (b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}', "bytes expected, .* bytes found"),
        (b"{", "Expecting"),
    ],
)
def test_a_damaged_header_is_a_value_error(tmp_path: Path, header: bytes, error: str) -> None:
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=error):
        TensorFile(tmp_path / "file")


def test_an_unsupported_dtype_writes_nothing(tmp_path: Path) -> None:
    tensors = {"fine": torch.ones(3), "0.weight/m": torch.ones(3, dtype=torch.complex128)}
    with pytest.raises(CheckpointError, match=r"^0\.weight/m: .*torch\.complex128"):
        write_tensors(tmp_path / "file", tensors)
    assert not (tmp_path / "file").exists()


CLIENT_STATE: dict[str, Any] = {
    "numpy scalars": [np.float64(0.5), np.int64(3), np.bool_(True), np.str_("text")],
    "arrays": {"float": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 2), np.float16)},
    "numpy": np.random.RandomState(0).get_state(),
    "generator": np.random.default_rng(0).bit_generator.state,
    "python": random.Random(0).getstate(),
    "torch": torch.get_rng_state(),
    "args": argparse.Namespace(lr=1.0, inner=argparse.Namespace(sizes=(1, np.ones(2)))),
    "ordered": OrderedDict(a=1),
    "size": torch.Size([2, 3]),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray | torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and one.tolist() == other.tolist()
    if isinstance(one, argparse.Namespace):
        return type(other) is argparse.Namespace and same(vars(one), vars(other))
    if isinstance(one, dict):
        return (
            type(one) is type(other) and [*one] == [*other] and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    return bool(one == other) and not isinstance(other, np.generic)


@pytest.mark.parametrize("key", CLIENT_STATE)
def test_values_of_scripts_have_the_same_types_after_loading(tmp_path: Path, key: str) -> None:
    write_plain(tmp_path / "state.pt", {key: CLIENT_STATE[key], "other": 1})
    loaded = read_plain(tmp_path / "state.pt")
    assert same({key: CLIENT_STATE[key], "other": 1}, loaded), loaded
    plain = torch.load(tmp_path / "state.pt", weights_only=True)  # as another program
    assert set(plain) == {key, "other"}
    assert same(loaded, unpack_state(pack_state({key: CLIENT_STATE[key], "other": 1})))


class OwnTensor(torch.Tensor):
    pass


def test_an_error_has_the_path_of_the_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^args\['layers'\]\[1\]: .* \(got function\)"):
        write_plain(tmp_path / "state.pt", {"args": argparse.Namespace(layers=[1, same])})
    arrays = [np.array(["a", None]), np.ma.masked_equal([1, 2], 2), np.ones(1, np.longdouble)]
    refused = [*arrays, np.datetime64(3, "s"), torch.ones(1).as_subclass(OwnTensor)]
    for value in refused:
        got = re.escape(f"(got {type(value).__name__} of {value.dtype})")
        with pytest.raises(ConfigError, match=rf"^7\[1\]: .* {got}"):
            write_plain(tmp_path / "state.pt", {7: (0, value)})  # pyright: ignore[reportArgumentType]
    reserved = {"ds_ext_type": "Namespace", "value": 3}
    for inner in (reserved, argparse.Namespace(**reserved)):
        with pytest.raises(ConfigError, match=r"^args\['a'\]\[0\]: .*ds_ext_type"):
            write_plain(tmp_path / "state.pt", {"args": argparse.Namespace(a=[inner])})
    with pytest.raises(ConfigError, match=r"^ds_ext_type: "):
        write_plain(tmp_path / "state.pt", reserved)


LEVELS: dict[str, Callable[[Any], Any]] = {
    "lists": lambda value: [value],
    "tuples": lambda value: (value,),
    "dictionaries": lambda value: {"key": value},
    "Namespaces": lambda value: argparse.Namespace(key=value),
}


@pytest.mark.parametrize("kind", LEVELS)
def test_values_have_100_levels_at_most(tmp_path: Path, kind: str) -> None:
    def nested(levels: int) -> dict[str, Any]:
        return {"deep": functools.reduce(lambda value, _: LEVELS[kind](value), range(levels - 1), 1)}

    write_plain(tmp_path / "state.pt", nested(100))
    assert same(read_plain(tmp_path / "state.pt"), nested(100))
    for levels in (101, 3_000):
        with pytest.raises(ConfigError, match=r"^deep\[.{80,100}\]: ") as caught:
            write_plain(tmp_path / "new.pt", nested(levels))
        assert re.findall(r" \d+", str(caught.value)) == [" 100", " 101"]
    assert not (tmp_path / "new.pt").exists()


def test_a_view_of_a_large_tensor_is_saved_without_the_rest(tmp_path: Path) -> None:
    large = torch.arange(100_000.0)
    views = {
        "slice": large[3:7],
        "column": large.view(1000, 100)[:3, 5],
        "inner": [large[8]],
        "none": large[:0],
    }
    write_plain(tmp_path / "state.pt", views)
    assert (tmp_path / "state.pt").stat().st_size < 10_000
    assert same(read_plain(tmp_path / "state.pt"), views)
    write_plain(tmp_path / "state.pt", {"expanded": torch.ones(1).expand(100_000)})
    assert (tmp_path / "state.pt").stat().st_size < 10_000


def test_a_value_that_contains_itself_is_named(tmp_path: Path) -> None:
    state: dict[str, Any] = {"fine": [1], "args": argparse.Namespace(layers=[2, {}])}
    state["args"].layers[1]["back"] = state["args"]
    with pytest.raises(ConfigError, match=r"^args\['layers'\]\[1\]\['back'\]: .* \(got a Namespace\)"):
        write_plain(tmp_path / "state.pt", state)
    twice = [1]
    write_plain(tmp_path / "state.pt", {"one": [twice, twice]})
    assert read_plain(tmp_path / "state.pt") == {"one": [[1], [1]]}


def test_byte_orders_and_keys_of_numpy(tmp_path: Path) -> None:
    write_plain(tmp_path / "state.pt", {"big": np.array([1, 2], ">i4"), "keys": {np.int64(3): 1}})
    loaded = read_plain(tmp_path / "state.pt")
    assert same(loaded, {"big": np.array([1, 2], "=i4"), "keys": {3: 1}})


def test_mappings_become_dictionaries_and_only_tensors_stay_shared(tmp_path: Path) -> None:
    write_plain(tmp_path / "state.pt", {"one": defaultdict(int, a=1), "other": Counter("aa")})
    assert same(read_plain(tmp_path / "state.pt"), {"one": {"a": 1}, "other": {"a": 2}})
    tensor, array = torch.ones(4), np.ones(2)
    write_plain(tmp_path / "state.pt", {"shared": [tensor, tensor, tensor[1:], array, array]})
    one, same_one, part, first, second = read_plain(tmp_path / "state.pt")["shared"]
    assert one is same_one and first is not second
    one[1] = 2
    assert part.tolist() == [1, 1, 1]
