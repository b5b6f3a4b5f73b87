"""Transfer of weights from backward to forward ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ds_ext.engine.fbd import weights as disaggregate_weights
from ds_ext.engine.fbd.weights import WeightLink
from ds_ext.errors import TransportError
from ds_ext.tensor_parallel import TensorParallel
from ds_ext.tensor_parallel.layers import sharded_parameter
from tests.links import connected_by_shm

STAGE = 3


def parameters(rank: int = 0, size: int = 1) -> list[Tensor]:
    """Return a replicated parameter, one sharded in each dimension, and one of another dtype."""
    tp = TensorParallel(merged=2) if size == 1 else TensorParallel(rank, size, object())  # pyright: ignore[reportArgumentType]
    cut = [sharded_parameter((4, 6), dim, tp, lambda full: full.zero_()) for dim in (0, 1)]
    return [nn.Parameter(torch.zeros(5)), *cut, nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]


def fill(shards: list[list[Tensor]], start: float) -> list[Tensor]:
    """Fill the shards with parts of full parameters. Returns the full parameters."""
    wholes = []
    for index, parts in enumerate(zip(*shards, strict=True)):
        dim = getattr(parts[0], "partition_dim", None)
        shape = list(parts[0].shape)
        if dim is not None:
            shape[dim] *= len(parts)
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) + start + 100 * index
        whole = numbers.to(parts[0].dtype)
        wholes.append(whole)
        for part, values in zip(
            parts, whole.chunk(len(parts), dim) if dim is not None else [whole] * 2, strict=False
        ):
            part.data.copy_(values)
    return wholes


def links(senders: int) -> tuple[WeightLink, list[WeightLink], list[list[Tensor]]]:
    transports = connected_by_shm(1 + senders)
    theirs = [parameters(rank, senders) for rank in range(senders)]
    forward = WeightLink(transports[0], parameters(), range(1, 1 + senders), senders, STAGE)
    backward = [WeightLink(transports[1 + rank], mine, [0], 1, STAGE) for rank, mine in enumerate(theirs)]
    return forward, backward, theirs


@pytest.mark.parametrize("senders", [1, 2])
@pytest.mark.parametrize(
    "piece", [1, 64, 1 << 20], ids=["one piece per parameter", "some pieces", "one piece per dtype"]
)
def test_versions_arrive_complete(monkeypatch: pytest.MonkeyPatch, senders: int, piece: int) -> None:
    """Shards are concatenated, and an unchanged version is not sent again."""
    monkeypatch.setattr(disaggregate_weights, "_PIECE_BYTES", piece)
    forward, backward, theirs = links(senders)
    for version, start in ((0, 1.0), (1, 7.0), (1, 7.0), (2, 9.0)):
        wholes = fill(theirs, start)
        forward.expect()
        for link in backward:
            link.send(version)
        forward.settle()
        assert forward.version == version
        for mine, whole in zip(forward.parameters, wholes, strict=True):
            assert torch.equal(mine, whole)
    assert not forward.transport.ready()


def test_a_skipped_step_sends_no_weights() -> None:
    forward, (backward,), theirs = links(1)
    for version in (4, 4):
        forward.expect()
        backward.send(version)
        forward.settle()
        theirs[0][0].data.add_(1)  # without a new version, this must not be sent
    assert forward.version == 4 and forward.parameters[0].tolist() == [0.0] * 5


def test_large_weights_are_received_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sender may wait for memory, and must not wait for a rank in a collective with it."""
    monkeypatch.setattr(disaggregate_weights, "LAZY_BYTES", 16)
    forward, (backward,), theirs = links(1)
    wholes = fill(theirs, 3.0)
    backward.send(0)
    forward.expect()
    assert torch.equal(forward.parameters[1], wholes[1])


def test_versions_that_differ_or_decrease() -> None:
    forward, backward, _ = links(2)
    forward.expect()
    for version, link in enumerate(backward):
        link.send(version)
    with pytest.raises(TransportError, match=r"^weights of stage 3: .*got 0, 1 from .*ranks 1, 2"):
        forward.settle()
    forward, (one,), _ = links(1)
    for version in (5, 4):
        forward.expect()
        one.send(version)
        if version == 5:
            forward.settle()
    with pytest.raises(TransportError, match=r"at least 5 \(got 4"):
        forward.settle()
