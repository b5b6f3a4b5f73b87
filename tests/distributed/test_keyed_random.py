"""Random numbers in a user's own layers: every schedule draws those of a plain process, and no generator moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_ext
from ds_ext.engine.rank_state import RankState
from ds_ext.engine.recovery import slots
from ds_ext.tensor_parallel import keyed_rng, layer_key
from tests.engine_runs import StepBatches
from tests.losses import learned
from tests.ranks import Ranks

STEPS, MICRO_BATCHES, LR, SEED = 3, 8, 0.1, 7
Case = tuple[str, int, int, dict[str, Any]]  # schedule, PP, recomputed layers in a block, further arguments
TWO_RANKS: list[Case] = [
    ("1f1b", 2, 0, {}),
    ("1f1b", 1, 1, {}),  # two data-parallel ranks
    ("1f1b", 2, 2, {"activation_checkpoint_func": partial(checkpoint, use_reentrant=True)}),
    ("interleaved", 2, 0, {}),
    ("bitpipe", 2, 1, {}),
    ("zb_v", 2, 2, {}),
    ("bitpipe_zb", 2, 0, {}),
    ("dpp", 2, 1, {}),
]
FOUR_RANKS: list[Case] = [("fbd", 2, 0, {}), ("fbd", 2, 1, {}), ("1f1b", 2, 2, {}), ("zb_h1", 2, 1, {})]


class Noisy(nn.Module):
    """Draws by dropout in training, and by rand also in evaluation; may recompute itself."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.linear, self.dropout, self.reentrant = nn.Linear(4, 4), nn.Dropout(0.3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.draw(x)
        return checkpoint(self.draw, x.requires_grad_(), use_reentrant=self.reentrant)

    def draw(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x + torch.rand(4))))


def jitter(x: Tensor) -> Tensor:
    return x * (1 + torch.rand_like(x))


def layers(nested: bool = False) -> list[Any]:
    reentrant = [None, True, False] if nested else [None]
    return [*(LayerSpec(Noisy, reentrant[i % len(reentrant)]) for i in range(7)), jitter]


def batches() -> StepBatches:
    generator = torch.Generator().manual_seed(0)
    return StepBatches(
        [
            [tuple(torch.randn(2, 2, 4, generator=generator)) for _ in range(MICRO_BATCHES)]
            for _ in range(STEPS)
        ]
    )


def build(case: Case, world_size: int, nested: bool = False, **section: Any) -> Any:
    schedule, pp, interval, arguments = case
    config = {
        "train_batch_size": 2 * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": pp, "print_plan": False, **section},
    }
    model = ds_ext.PipelineModule(
        layers(nested),
        config,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
        activation_checkpoint_interval=interval,
        **arguments,
    )
    return ds_ext.initialize(model=model, config=config)[0]


def run(engine: Any, steps: int, data: StepBatches) -> list[float]:
    """Losses of the steps, and of an evaluation after them."""
    before, losses = torch.get_rng_state(), []
    for _ in range(steps):
        losses.append(float(engine.train_batch(data)))
    losses.append(float(engine.eval_batch(batches())))
    assert torch.equal(torch.get_rng_state(), before)
    return losses


def run_cases(rank: int, cases: list[Case], world_size: int, nested: bool) -> list[list[float]]:
    found = []
    for case in cases:
        torch.manual_seed(SEED + rank)
        engine = build(case, world_size, nested)
        assert engine.random_seed == SEED
        found.append(run(engine, STEPS, batches()))
        engine.transport.close()
    return found


def in_one_process(keyed: Callable[[int, int, int], Any]) -> list[float]:
    """Losses of the same steps and of the evaluation, each layer in the context ``keyed(step, micro_batch, layer)``."""
    functions: list[Any] = []
    with torch.random.fork_rng():
        for index, layer in enumerate(layers()):
            torch.manual_seed(1234 + index)  # as the pipeline seeds each layer
            functions.append(layer.build() if isinstance(layer, LayerSpec) else layer)
    chain = nn.ModuleList(layer for layer in functions if isinstance(layer, nn.Module))
    optimizer, losses, data = torch.optim.SGD(chain.parameters(), lr=LR), [], batches()

    def loss_of(step: int, micro_batch: int) -> Tensor:
        x, y = data.get(micro_batch)
        for index, layer in enumerate(functions):
            with keyed(step, micro_batch, index):
                x = layer(x)
        return nn.functional.mse_loss(x, y) / MICRO_BATCHES

    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [loss_of(step, j) for j in range(MICRO_BATCHES)]
        sum(parts).backward()  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
        losses.append(float(sum(part.detach() for part in parts)))
        data.advance(MICRO_BATCHES)
    data = batches()
    chain.eval()
    with torch.no_grad():
        losses.append(float(sum(loss_of(STEPS, j) for j in range(MICRO_BATCHES))))
    return [*learned(losses[:-1]), losses[-1]]


def expected_losses() -> list[float]:
    return in_one_process(lambda *place: keyed_rng(layer_key(SEED, *place), torch.device("cpu")))


@pytest.mark.parametrize(
    ("cases", "world_size", "nested"),
    [
        (TWO_RANKS, 2, False),
        (FOUR_RANKS, 4, False),
        ([("zb_v", 2, 0, {}), ("1f1b", 2, 1, {}), ("zb_v", 2, 1, {})], 2, True),
    ],
    ids=["two_ranks", "four_ranks", "nested_recomputation"],
)
def test_every_schedule_draws_the_numbers_of_one_process(
    ranks: Ranks, cases: list[Case], world_size: int, nested: bool
) -> None:
    expected = expected_losses()
    for found in ranks(world_size).run(run_cases, cases, world_size, nested):
        for case, losses in zip(cases, found, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), case


def resumed(rank: int, folder: str, module_only: bool) -> tuple[list[float], int, list[int]]:
    """Losses of a run that continues after one step under another schedule and seed, its seed, and those before."""
    torch.manual_seed(SEED)
    engine, data = build(TWO_RANKS[0], 2), batches()
    engine.train_batch(data)
    engine.save_checkpoint(folder, "one")
    engine.transport.close()
    torch.manual_seed(SEED + 1)
    engine = build(("bitpipe", 2, 1, {}), 2)
    seeds = [engine.random_seed]
    engine.load_checkpoint(folder, "one", load_module_only=module_only)
    seeds.append(engine.random_seed)
    losses = run(engine, STEPS - 1, data)
    engine.transport.close()
    return losses, engine.random_seed, seeds


def test_a_resumed_run_keeps_its_seed(ranks: Ranks, tmp_path: Path) -> None:
    for losses, seed, seeds in ranks(2).run(resumed, str(tmp_path / "a"), False):
        assert losses == pytest.approx(expected_losses()[1:], rel=1e-5)
        assert (seed, seeds) == (SEED, [SEED + 1, SEED])
    for losses, seed, _ in ranks(2).run(resumed, str(tmp_path / "b"), True):
        assert losses != pytest.approx(expected_losses()[1:], rel=1e-5)
        assert seed == SEED + 1


def drawn() -> list[float]:
    """Numbers of the default generators, as a data loader of a script may draw them."""
    return [float(torch.rand(())), random.random(), float(np.random.rand()), float(torch.randn(()))]


def draw_before_and_after(rank: int, folder: str, pipeline: int, save: bool) -> list[float]:
    """Numbers drawn after a save, or after its load with ``pipeline`` ranks."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(SEED + rank + 10 * (not save))
    engine = build(("1f1b", pipeline, 0, {}), pipeline)
    if save:
        engine.train_batch(batches())
        drawn()
        engine.save_checkpoint(folder, "one")
    else:
        engine.load_checkpoint(folder, "one")
    engine.transport.close()
    return drawn()


def test_a_resumed_rank_draws_the_numbers_that_follow(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(2).run(draw_before_and_after, str(tmp_path), 2, True)
    assert first[0] != first[1]
    assert ranks(2).run(draw_before_and_after, str(tmp_path), 2, False) == first
    (alone,) = ranks(1).run(draw_before_and_after, str(tmp_path), 1, False)
    assert alone not in first  # of another number of ranks: new


def recovered(rank: int) -> tuple[list[float], int, int]:
    """Losses of a run that continues from a snapshot with another seed, its seed, and the one before."""
    torch.manual_seed(SEED)
    engine, data = build(TWO_RANKS[0], 2), batches()
    engine.train_batch(data)
    tensors = {name: tensor.clone() for name, tensor in RankState(engine).tensors().items()}
    values = slots.unpack_state(slots.pack_state(RankState(engine).values()))
    engine.transport.close()
    torch.manual_seed(SEED + 1)
    engine = build(TWO_RANKS[0], 2)
    seed = engine.random_seed
    RankState(engine).load(tensors, values)
    losses = run(engine, STEPS - 1, data)
    engine.transport.close()
    return losses, engine.random_seed, seed


def test_a_recovered_run_keeps_its_seed(ranks: Ranks) -> None:
    for losses, *seeds in ranks(2).run(recovered):
        assert losses == pytest.approx(expected_losses()[1:], rel=1e-5)
        assert seeds == [SEED, SEED + 1]


def without_keys(rank: int) -> list[tuple[list[float], bool]]:
    """Losses of one step with the generator of the script, and whether it moved; twice."""
    found = []
    for interval in (0, 1):
        torch.manual_seed(SEED)
        engine = build(("1f1b", 1, interval, {}), 1, keyed_random=False)
        before = torch.get_rng_state()
        losses = [float(engine.train_batch(data)) for data in [batches()] for _ in range(STEPS)]
        found.append((losses, not torch.equal(torch.get_rng_state(), before)))
        engine.transport.close()
    return found


def test_layers_draw_from_the_generator_of_the_script_without_keys(ranks: Ranks) -> None:
    # The step of a single rank and stage runs its micro-batches one after the other, as a plain loop does.
    (found,) = ranks(1).run(without_keys)
    expected = with_generator_of_script()
    for losses, moved in found:
        assert moved and losses == pytest.approx(expected, rel=1e-5)


def with_generator_of_script() -> list[float]:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return in_one_process(lambda *_: nullcontext())[:-1]
