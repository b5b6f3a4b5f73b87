"""Sharded layers in a group of one rank equal torch's layers. Their initial weights depend on a key."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_ext.errors import ConfigError
from ds_ext.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    keyed_normal,
    shard_dim,
)

ONE = TensorParallel()


class _OtherRank(TensorParallel):
    """Rank of a larger group, for tests without communication."""

    def __post_init__(self) -> None:
        pass


def ranks_of(size: int) -> list[TensorParallel]:
    return [_OtherRank(rank, size) for rank in range(size)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


@pytest.mark.parametrize("layer_type", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_equal_torch(layer_type: type, bias: bool) -> None:
    layer = layer_type(12, 8, ONE, bias=bias, init=keyed_normal(0.5, "w"))
    plain = nn.Linear(12, 8, bias=bias)
    plain.load_state_dict(layer.state_dict())
    x, plain_x = random(2, 3, 12), random(2, 3, 12)
    output, expected = layer(x), plain(plain_x)
    torch.testing.assert_close(output, expected)
    weights = random(*output.shape, seed=1).detach()
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad)
    for parameter, plain_parameter in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, plain_parameter.grad)


@pytest.mark.parametrize("layer_type", [ColumnParallelLinear, RowParallelLinear])
def test_linear_gradients_are_exact(layer_type: type) -> None:
    layer = layer_type(4, 6, ONE, init=keyed_normal(0.5, "w")).double()
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    parameters = dict(layer.named_parameters())
    names = list(parameters)

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *parameters.values()))


def test_embedding_equals_torch() -> None:
    layer = VocabParallelEmbedding(16, 5, ONE, init=keyed_normal(1.0, "e"))
    ids = torch.tensor([[0, 15, 3], [3, 3, 7]])
    layer(ids).pow(2).sum().backward()
    table = layer.weight.detach().clone().requires_grad_()
    F.embedding(ids, table).pow(2).sum().backward()
    assert torch.equal(layer(ids), F.embedding(ids, table))
    torch.testing.assert_close(layer.weight.grad, table.grad)


@pytest.mark.parametrize("size", [2, 4])
def test_shards_concatenate_to_the_weight_of_one_rank(size: int) -> None:
    builders = {
        "column": lambda tp: ColumnParallelLinear(6, 8, tp, init=keyed_normal(1.0, 1, "c")),
        "row": lambda tp: RowParallelLinear(8, 6, tp, init=keyed_normal(1.0, 1, "r")),
        "embedding": lambda tp: VocabParallelEmbedding(16, 6, tp, init=keyed_normal(1.0, 1, "e")),
    }
    dims = {"column.weight": 0, "column.bias": 0, "row.weight": 1, "row.bias": None, "embedding.weight": 0}
    for kind, build in builders.items():
        shards = [dict(build(tp).named_parameters()) for tp in ranks_of(size)]
        for name, full in build(ONE).named_parameters():
            dim = dims[f"{kind}.{name}"]
            assert shard_dim(full) == dim
            assert [shard_dim(shard[name]) for shard in shards] == [dim] * size
            if dim is None:
                assert all(torch.equal(shard[name], full) for shard in shards)
                assert not hasattr(full, "model_parallel")
            else:
                assert torch.equal(torch.cat([shard[name] for shard in shards], dim), full)
                assert full.model_parallel and full.tensor_model_parallel


def test_a_shard_does_not_keep_the_full_weight_alive() -> None:
    layer = ColumnParallelLinear(8, 64, ranks_of(4)[1], init=keyed_normal(1.0, "c"))
    assert layer.weight.untyped_storage().nbytes() == 8 * 16 * 4


def test_ranks_share_the_rows_of_a_group() -> None:
    """Two groups of three features: sharded over two ranks, whole on four, of which two compute the same rows."""
    x, init = torch.arange(8.0), keyed_normal(1.0, "c")
    whole = ColumnParallelLinear(8, 6, ONE, False, init=init, groups=2)
    for size, replicated in ((2, False), (4, True)):
        for rank, tp in enumerate(ranks_of(size)):
            layer = ColumnParallelLinear(8, 6, tp, False, init=init, groups=2)
            assert (shard_dim(layer.weight) is None) == replicated
            assert len(layer.weight) == (6 if replicated else 3)
            rows = slice(0, 3) if rank < size // 2 else slice(3, 6)
            with torch.no_grad():
                torch.testing.assert_close(layer.project(x), whole(x)[rows])


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    ColumnParallelLinear(8, 8, ONE, init=keyed_normal(1.0, "c"))
    RowParallelLinear(8, 8, ONE, init=keyed_normal(1.0, "r"))
    VocabParallelEmbedding(8, 8, ONE, init=keyed_normal(1.0, "e"))
    assert torch.equal(torch.get_rng_state(), before)


def test_indivisible_sizes_are_refused() -> None:
    tp = ranks_of(4)[0]
    with pytest.raises(ConfigError, match=r"^output_size: .*4 .*6.* 4 or 8\."):
        ColumnParallelLinear(8, 6, tp, init=nn.init.zeros_)
    with pytest.raises(ConfigError, match=r"^input_size: .*4 .*3.* 4\."):
        RowParallelLinear(3, 8, tp, init=nn.init.zeros_)
    with pytest.raises(ConfigError, match=r"^num_embeddings: "):
        VocabParallelEmbedding(10, 8, tp, init=nn.init.zeros_)
    with pytest.raises(ConfigError, match=r"^groups: .*4 .*3"):
        ColumnParallelLinear(8, 12, tp, init=nn.init.zeros_, groups=3)


def test_a_group_needs_its_process_group_and_a_rank_inside() -> None:
    with pytest.raises(ConfigError, match=r"group: .*size 2 "):
        TensorParallel(rank=0, size=2)
    with pytest.raises(ConfigError, match=r"rank: .*1 of size 1"):
        TensorParallel(rank=1)


@pytest.mark.parametrize("bad", [-1, 16])
def test_an_id_outside_the_sharded_table_is_an_error_not_a_zero(bad: int) -> None:
    layer = VocabParallelEmbedding(16, 4, ranks_of(2)[0], init=nn.init.ones_)
    with pytest.raises(IndexError, match=r"ids: .*0\.\.15"):
        layer(torch.tensor([[0, bad]]))
