"""Messages between stages arrive unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ext.engine.messages import pack, unpack
from ds_ext.errors import ConfigError

X, Y = torch.ones(2, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize("value", [X, (X,), (X, Y), (Y, X, Y), (torch.empty(0),), (X, torch.empty(0))])
def test_a_tensor_stays_bare_and_a_tuple_a_tuple(value: Any) -> None:
    found = unpack(pack(value, "stage 0"))
    assert type(found) is type(value)
    if torch.is_tensor(found):
        assert found is value
    else:
        assert [id(one) for one in found] == [id(one) for one in value]


def test_a_list_becomes_a_tuple() -> None:
    assert unpack(pack([X, Y], "stage 0")) == (X, Y)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"hidden": X}, "stage 3: must return a tensor or a tuple of tensors (got a dict)"),
        ((X, None), "(got a tuple of Tensor, NoneType)"),
        ((), "(got a tuple)"),
        (None, "(got a NoneType)"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pack(value, "stage 3")
    assert says in str(caught.value)
