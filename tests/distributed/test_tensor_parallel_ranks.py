"""A tensor-parallel group of two or four ranks computes what one rank computes.

Every comparison runs on the ranks themselves: each holds the full answer of a single rank beside its shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ext.planner.memory import model_parameters
from ds_ext.planner.training_sizes import TrainingSizes
from ds_ext.recipes.models.gpt import GPTConfig, gpt_loss
from ds_ext.recipes.models.layers import TransformerLayer
from ds_ext.tensor_parallel import (
    ColumnParallelLinear,
    DropoutClock,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    keyed_normal,
    reduce_from_tensor_model_parallel_region,
    shard_dim,
    vocab_parallel_cross_entropy,
)
from tests.engine_runs import MODEL, Job, build
from tests.losses import mean
from tests.ranks import Ranks
from tests.reference import Chain, assert_close_gradients, gather_shards, random_batches, train_reference

ONE = TensorParallel()
SIZES = pytest.mark.parametrize("size", [2, 4])
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=12,
    vocab_size=100,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


def world(rank: int) -> TensorParallel:
    return TensorParallel(rank, dist.get_world_size(), dist.group.WORLD)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def assert_same_on_all_ranks(x: Tensor, tp: TensorParallel, what: str) -> None:
    copies = gather_shards(x.detach().unsqueeze(0), 0, tp)
    assert all(torch.equal(copy, copies[0]) for copy in copies), f"{what} differs between the ranks"


def assert_same_gradients(sharded: nn.Module, full: nn.Module, tp: TensorParallel) -> None:
    for (name, ours), expected in zip(sharded.named_parameters(), full.parameters(), strict=True):
        assert ours.grad is not None and expected.grad is not None, name
        if shard_dim(ours) is None:
            assert_same_on_all_ranks(ours.grad, tp, name)
        grad = gather_shards(ours.grad, shard_dim(ours), tp)
        assert_close_gradients(grad[: len(expected)], expected.grad, name)


def mappings_do_what_their_table_says(rank: int) -> None:
    tp = world(rank)
    full = random(3, 2 * tp.size).detach()
    total = tp.size * (tp.size + 1) / 2  # of the factors rank + 1

    def run(mapping: Callable[[Tensor, TensorParallel], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the input's gradient when the output's gradient is itself times rank + 1."""
        x = x.clone().requires_grad_()
        before = x.detach().clone()
        y = mapping(x, tp)
        y.backward((rank + 1) * y.detach())
        assert torch.equal(x, before) and x.grad is not None
        return y.detach(), x.grad

    y, grad = run(copy_to_tensor_model_parallel_region, full)
    assert torch.equal(y, full)
    torch.testing.assert_close(grad, full * total)

    y, grad = run(reduce_from_tensor_model_parallel_region, full * (rank + 1))
    torch.testing.assert_close(y, full * total)
    torch.testing.assert_close(grad, y * (rank + 1))


def layers_equal_one_rank(rank: int) -> None:
    tp = world(rank)
    inits = [keyed_normal(0.3, name) for name in ("a", "b", "e")]
    embed, embed_one = (VocabParallelEmbedding(40, 16, t, init=inits[2]) for t in (tp, ONE))
    column, column_one = (ColumnParallelLinear(16, 24, t, init=inits[0]) for t in (tp, ONE))
    row, row_one = (RowParallelLinear(24, 8, t, init=inits[1]) for t in (tp, ONE))
    ids = torch.randint(40, (3, 7), generator=torch.Generator().manual_seed(1))
    weights = random(3, 7, 8, seed=2).detach()
    outputs = []
    for first, second, third in ((embed, column, row), (embed_one, column_one, row_one)):
        y = third(torch.tanh(second(first(ids))))
        (y * weights).sum().backward()
        outputs.append(y.detach())
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    assert_same_on_all_ranks(outputs[0], tp, "output")
    sharded, full = nn.ModuleList([embed, column, row]), nn.ModuleList([embed_one, column_one, row_one])
    assert_same_gradients(sharded, full, tp)


def cross_entropy_equals_one_rank(rank: int, vocab_size: int, padded: int, dtype: torch.dtype) -> None:
    tp = world(rank)
    full = (random(4, 5, padded).detach() * 5).to(dtype).requires_grad_()
    shard = tp.shard(full.detach(), 2).clone().requires_grad_()
    labels = torch.randint(vocab_size, (4, 5), generator=torch.Generator().manual_seed(3))
    weights = torch.linspace(0.0, 1.0, 20).view(4, 5)
    ours = vocab_parallel_cross_entropy(shard, labels, tp, vocab_size)
    expected = vocab_parallel_cross_entropy(full, labels, ONE, vocab_size)
    torch.testing.assert_close(ours, expected)
    assert_same_on_all_ranks(ours, tp, "loss")
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    assert shard.grad is not None
    torch.testing.assert_close(gather_shards(shard.grad, 2, tp), full.grad)


def gpt_gradients_equal_one_rank(rank: int, recompute: Any, sequence_parallel: bool) -> None:
    tp = world(rank)
    tokens_BS, labels_BS = random_batches(CONFIG, 1, 1)[0][0]
    config = replace(CONFIG, recompute=recompute, sequence_parallel=sequence_parallel)
    ours, expected = Chain(config, tp, DropoutClock()), Chain(CONFIG, ONE, DropoutClock())
    for (name, p), full in zip(ours.parameters_by_layer().items(), expected.parameters(), strict=True):
        start = gather_shards(p, shard_dim(p), tp)
        assert torch.equal(start[: CONFIG.vocab_size], full[: CONFIG.vocab_size]), name
        assert torch.count_nonzero(start[len(full) :]) == 0
    losses = []
    for model, t in ((ours, tp), (expected, ONE)):
        loss = mean(gpt_loss(config, t)(model(tokens_BS), labels_BS))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same_gradients(ours, expected, tp)


def a_layer_takes_and_gives_slices(rank: int) -> None:
    """Outputs and input gradients are slices of the full ones; dropout masks of the slices differ."""
    tp = world(rank)
    config = replace(CONFIG, sequence_parallel=True)
    layer, whole = (
        TransformerLayer(config, 0, tp, DropoutClock()),
        TransformerLayer(CONFIG, 0, ONE, DropoutClock()),
    )
    hidden_BSD, grad_BSD = random(2, 12, 32), random(2, 12, 32, seed=1).detach()
    mine_BsD = tp.shard(hidden_BSD, 1).detach().requires_grad_()
    full_BSD, out_BsD = whole(hidden_BSD), layer(mine_BsD)
    torch.testing.assert_close(out_BsD, tp.shard(full_BSD, 1))
    full_BSD.backward(grad_BSD)
    out_BsD.backward(tp.shard(grad_BSD, 1))
    assert hidden_BSD.grad is not None and mine_BsD.grad is not None
    torch.testing.assert_close(mine_BsD.grad, tp.shard(hidden_BSD.grad, 1))
    dropping = TransformerLayer(replace(config, hidden_dropout=0.4), 0, tp, DropoutClock(1, 2))
    keys = gather_shards(torch.tensor([dropping.mlp_dropout.key() >> 1]), 0, tp)
    assert len(set(keys.tolist())) == tp.size


def in_place_changes_are_found(rank: int) -> None:
    """A backward reports in-place changes of the weight and of the input, and a second differentiation."""
    tp = world(rank)
    for change_weight in (True, False):
        layer = ColumnParallelLinear(8, 8, tp, sequence_parallel=True, init=nn.init.ones_)
        mine_BsD = random(2, 3, 8).detach().requires_grad_() * 1.0
        y = layer(mine_BsD)
        with torch.no_grad():
            (layer.weight if change_weight else mine_BsD).add_(1.0)
        with pytest.raises(RuntimeError, match="inplace"):
            y.sum().backward()
    layer = ColumnParallelLinear(8, 8, tp, sequence_parallel=True, init=nn.init.ones_)
    x_BsD = random(2, 3, 8).detach().requires_grad_()
    (grad_BsD,) = torch.autograd.grad((layer(x_BsD) ** 2).sum(), x_BsD, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_BsD.sum().backward()


def training_equals_one_rank(rank: int, optimizer: str) -> None:
    batches = random_batches(CONFIG, 5, 3)
    # Adam divides by the gradient's own size: an eps above the rounding errors keeps them from growing.
    options = {"sgd": {"lr": 0.2}, "adamw": {"lr": 0.003, "eps": 1e-4, "weight_decay": 0.01}}[optimizer]
    run, expected = (
        train_reference(CONFIG, batches, 5, optimizer=optimizer, clip=0.5, tp=t, **options)  # type: ignore[arg-type]
        for t in (world(rank), ONE)
    )
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert min(expected.grad_norms) > 0.5, "clipping never acted"
    for name, full in expected.parameters.items():
        ours, scale = run.parameters[name][: len(full)], float(full.abs().max())
        torch.testing.assert_close(ours, full, rtol=0, atol=1e-5 * scale, msg=name)


def dropout_masks_fit_the_sharding(rank: int) -> None:
    """Replicated activations are masked alike, so outputs agree; each rank's heads have their own masks."""
    tp = world(rank)
    config = replace(CONFIG, hidden_dropout=0.4, attention_dropout=0.4)
    layer = TransformerLayer(config, 0, tp, DropoutClock(1, 2))
    hidden = random(2, 12, 32)
    out = layer(hidden)
    out.sum().backward()
    assert hidden.grad is not None
    assert_same_on_all_ranks(out, tp, "output")
    assert_same_on_all_ranks(hidden.grad, tp, "gradient")
    keys = gather_shards(torch.tensor([layer.self_attention.dropout.key() >> 1]), 0, tp)
    assert len(set(keys.tolist())) == tp.size


def training_with_dropout_is_reproducible(rank: int) -> list[float]:
    config = replace(CONFIG, hidden_dropout=0.2, attention_dropout=0.2)
    batches = random_batches(config, 2, 2)
    plain = train_reference(config, batches, 2, 0.2, tp=world(rank))
    recomputed = train_reference(replace(config, recompute="full"), batches, 2, 0.2, tp=world(rank))
    assert recomputed.losses == plain.losses
    for name, parameter in plain.parameters.items():
        assert torch.equal(recomputed.parameters[name], parameter), name
    return plain.losses


@SIZES
def test_mappings(ranks: Ranks, size: int) -> None:
    ranks(size).run(mappings_do_what_their_table_says)


@SIZES
def test_layers(ranks: Ranks, size: int) -> None:
    ranks(size).run(layers_equal_one_rank)


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "padded"), [(32, 32), (27, 32), (5, 32)])
def test_cross_entropy(ranks: Ranks, size: int, vocab_size: int, padded: int, dtype: torch.dtype) -> None:
    ranks(size).run(cross_entropy_equals_one_rank, vocab_size, padded, dtype)


@SIZES
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gpt_gradients_and_start_weights(
    ranks: Ranks, size: int, recompute: str, sequence_parallel: bool
) -> None:
    ranks(size).run(gpt_gradients_equal_one_rank, recompute, sequence_parallel)


def test_sequence_parallel_ranks_keep_and_pass_on_a_slice_of_the_tokens(ranks: Ranks) -> None:
    ranks(2).run(a_layer_takes_and_gives_slices)


def test_in_place_changes_before_the_backward_are_found(ranks: Ranks) -> None:
    ranks(2).run(in_place_changes_are_found)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training(ranks: Ranks, optimizer: str) -> None:
    ranks(2).run(training_equals_one_rank, optimizer)


@SIZES
def test_dropout_masks(ranks: Ranks, size: int) -> None:
    ranks(size).run(dropout_masks_fit_the_sharding)


def test_recomputation_with_dropout(ranks: Ranks) -> None:
    first, second = ranks(2).run(training_with_dropout_is_reproducible)
    assert first == second


def counted_parameters(rank: int, job: Job) -> tuple[int, int]:
    engine, _ = build(job)
    engine.transport.close()
    return engine.run_facts["parameters"], engine.run_facts["trained_parameters"]


def test_facts_count_shards_replicas_and_ties_once(ranks: Ranks) -> None:
    """The planner computes the same numbers from the sizes alone."""
    total = model_parameters(TrainingSizes.of_model(MODEL))
    assert ranks(4).run(counted_parameters, Job("bitpipe", 2, 2, 1, 4, MODEL, 1)) == [(total, total)] * 4
