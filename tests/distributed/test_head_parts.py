"""A head in parts on all devices trains to the losses and weights of one plain process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine_runs import MODEL, Job, StepBatches, batches_of, build, reference, train, weights
from tests.ranks import Ranks

UNTIED = replace(MODEL, untie_embeddings_and_output_weights=True, vocab_size=90)
HEAD = UNTIED.num_layers + 3  # index of the head's layer


def joined(results: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """All weights of a run with head parts by name, with those of the head joined and without padding."""
    merged = {name: weight for result in results for name, weight in result["weights"].items()}
    parts = sorted(int(name.partition(".")[0]) for name in merged if int(name.partition(".")[0]) >= HEAD)
    head = torch.cat([merged.pop(f"{part}.weight") for part in parts])
    return {**merged, f"{HEAD}.weight": head[: UNTIED.vocab_size]}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "bitpipe_zb", "interleaved"])
def test_smoke(ranks: Ranks, schedule: str) -> None:
    job = Job(schedule, 2, 1, 1, 4, UNTIED, 3, head_parts=True)
    results = ranks(job.world_size).run(train, job, timeout_s=60)
    expected = reference(job)
    for result in results:
        assert result["losses"] == pytest.approx(expected.losses, rel=1e-5)
        assert result["norms"] == pytest.approx(expected.grad_norms, rel=1e-4)
    found = joined(results)
    assert found.keys() == expected.parameters.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected.parameters[name][: len(weight)], rtol=1e-4, atol=1e-5)
