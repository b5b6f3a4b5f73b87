"""Gradients that share memory are reduced in it."""

from __future__ import annotations

import torch

from ds_ext.engine.weights.reduction import joined_views


def test_neighbors_in_a_storage_are_one_view() -> None:
    sums, others = torch.arange(12.0), torch.arange(6.0)
    parts = [sums[2:6].view(2, 2), others[:2], sums[6:8], torch.ones(3), others[3:]]
    views, rest = joined_views(parts)
    assert sorted(view.tolist() for view in views) == [[2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    assert {tensor.data_ptr() for tensor in rest} == {parts[i].data_ptr() for i in (1, 3, 4)}
    views[0].neg_()
    assert sums[2:8].tolist() == [-2.0, -3.0, -4.0, -5.0, -6.0, -7.0]


def test_columns_of_a_matrix_have_no_neighbors() -> None:
    columns = list(torch.arange(6.0).view(3, 2).unbind(1))
    views, rest = joined_views(columns)
    assert not views and len(rest) == 2
