"""Facts of a job that ranks compare."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ds_ext.engine.facts import data_facts


class Augmented(torch.utils.data.Dataset[Any]):
    """Data set that draws from the global generators."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.randn(4), random.random()


def test_the_first_sample_changes_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    model = SimpleNamespace(layout=SimpleNamespace(placement=SimpleNamespace(stages=2)), stages=(0,))
    states = random.getstate(), torch.get_rng_state()
    facts = data_facts(cast(Any, model), Augmented())
    assert set(facts) == {"training_data", "training_data: first sample"}
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    assert seeds == []  # those of GPUs
