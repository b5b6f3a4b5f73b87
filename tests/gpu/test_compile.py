"""``engine.compile()`` on one GPU: compiled layers have the gradients of plain ones, in whole and split backwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from tests.distributed.test_compile import gradients
from tests.engine_runs import SPLIT
from tests.gpu.ranks import gpu_ranks, needs_gpu, use_gpu
from tests.ranks import RankPool
from tests.reference import assert_close_gradients

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with gpu_ranks(2) as pool:
        yield pool


def gradients_on_gpu(rank: int, schedule: str, backend: str) -> list[tuple[float, dict[str, Tensor]]]:
    """(loss, gradients on the CPU) of a step, without and with compiled layers."""
    use_gpu()
    found = gradients(rank, schedule, "llama", backend)
    return [(loss, {name: grad.cpu() for name, grad in grads.items()}) for loss, grads in found]


@pytest.mark.parametrize(
    ("schedule", "backend"),
    [
        *((schedule, "aot_eager") for schedule in ("1f1b", *SPLIT)),
        ("1f1b", "inductor"),
        ("bitpipe_zb", "inductor"),
    ],
)
def test_compiled_layers_have_the_same_gradients(ranks: RankPool, schedule: str, backend: str) -> None:
    for (loss, plain), (compiled_loss, compiled) in ranks.run(
        gradients_on_gpu, schedule, backend, timeout_s=180
    ):
        assert compiled_loss == pytest.approx(loss, rel=1e-4)
        assert compiled.keys() == plain.keys()
        for name, gradient in plain.items():
            assert_close_gradients(compiled[name], gradient, name)
