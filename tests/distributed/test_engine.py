"""Beyond parity: DeepSpeed's own engine as a yardstick, evaluation, resume, tuples and shapes, failures."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn

from ds_ext.engine import PipelineModule, initialize
from ds_ext.errors import TransportError
from ds_ext.pipe_schedules import get_schedule
from ds_ext.recipes.models.gpt import gpt_layer_specs, gpt_loss
from ds_ext.tensor_parallel import DropoutClock, TensorParallel
from tests.engine_runs import MODEL, SCHEDULES, Job, StepBatches, build, train
from tests.losses import learned, mean
from tests.plans import batch_of
from tests.ranks import RankPool, Ranks
from tests.reference import Chain, random_batches
from tests.selection import select

# --- measurements ---


def measured(rank: int) -> tuple[list[Any], list[Any]]:
    """Documented measurements of the engine before and after a step."""
    job = Job("1f1b", 2, 1, 1, micro_batches=4, model=MODEL)
    engine, _ = build(job)

    def values() -> list[Any]:
        names = ("step_s", "step_lr", "bubble_measured", "peak_memory_bytes", "peak_memory_of_ranks")
        return [getattr(engine, name) for name in names]

    before = values()
    engine.train_batch(StepBatches(random_batches(job.model, 1, job.micro_batches)))
    engine.transport.close()
    return before, values()


def test_measurements_of_a_step(ranks: Ranks) -> None:
    results = ranks(2).run(measured)
    assert [before[:4] for before, _ in results] == [[None] * 4] * 2
    for before, (step_s, lr, bubble, peak, peaks) in results:
        assert not before[4] and step_s > 0 and lr > 0 and 0 <= bubble < 1
        assert peak == max(peaks) and len(peaks) == 2
    assert len({(bubble, *peaks) for _, (_, _, bubble, _, peaks) in results}) == 1


# --- DeepSpeed's own engine ---


def train_with_deepspeed(rank: int, job: Job) -> list[float]:
    """The same model under DeepSpeed's PipelineEngine and TrainSchedule."""
    tp = TensorParallel()
    module = deepspeed.pipe.PipelineModule(
        gpt_layer_specs(job.model, tp, DropoutClock()),
        topology=PipeDataParallelTopology(job.pp, job.dp),
        loss_fn=lambda logits_BSV, labels_BS: mean(gpt_loss(job.model, tp)(logits_BSV, labels_BS)),
        partition_method="type:TransformerLayer",
    )
    config = {k: v for k, v in job.config().items() if k != "ds_ext"}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    assert type(engine._train_schedule()) is ds.TrainSchedule
    count = job.micro_batches
    first = engine.grid.get_data_parallel_id() * count
    steps = random_batches(job.model, job.steps, count * job.dp)
    data = iter([batch for step in steps for batch in step[first : first + count]])
    return [float(engine.train_batch(data)) for _ in range(job.steps)]


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_1f1b_gives_the_losses_of_deepspeeds_own_engine(ranks: Ranks, pp: int, dp: int) -> None:
    # Its norm is wrong in fp32 without ZeRO (only the first stage counts), so neither clips here.
    job = Job("1f1b", pp, 1, dp, micro_batches=4, model=MODEL, deepspeed={"gradient_clipping": 0.0})
    theirs = ranks(job.world_size).run(train_with_deepspeed, job, timeout_s=120)
    ours = ranks(job.world_size).run(train, job, timeout_s=120)
    for rank in range(job.world_size):
        assert ours[rank]["losses"] == pytest.approx(learned(theirs[rank]), rel=1e-5)


# --- evaluation ---


def evaluate(rank: int, job: Job, num_micro_batches: int) -> tuple[float, float, int]:
    engine, _ = build(dataclasses.replace(job, micro_batches=8))
    replicas = engine.layout.placement.replicas
    per_step = num_micro_batches * replicas * job.dp
    batches = random_batches(job.model, 2, per_step)
    loss = engine.eval_batch(StepBatches(batches), num_micro_batches=num_micro_batches)
    again, outputs = engine.eval_batch(
        StepBatches(batches), num_micro_batches=num_micro_batches, return_logits=True
    )
    engine.train_batch(StepBatches(random_batches(job.model, 1, 8 * job.dp)))
    assert float(again) == float(loss)
    return (
        float(loss),
        float(engine.eval_batch(StepBatches(batches), num_micro_batches=num_micro_batches)),
        len(outputs),
    )


@pytest.mark.parametrize(
    ("schedule", "num_micro_batches"),
    select(
        [*product(SCHEDULES, [1, 3, 4])],
        [("1f1b", 3), ("bitpipe", 1), ("bitpipe", 3), ("chimera", 4), ("interleaved", 4), ("zb_v", 1)],
    ),
)
def test_evaluation_is_the_mean_loss_without_dropout(
    ranks2: RankPool, schedule: str, num_micro_batches: int
) -> None:
    model = dataclasses.replace(MODEL, hidden_dropout=0.5)
    job = Job(schedule, 2, 1, 1, micro_batches=8, model=model)
    results = ranks2.run(evaluate, job, num_micro_batches)
    count = num_micro_batches * get_schedule(schedule).placement(2).replicas
    reference = Chain(model, TensorParallel(), DropoutClock()).eval()
    with torch.no_grad():
        losses = [
            mean(gpt_loss(model, TensorParallel())(reference(x), y))
            for x, y in random_batches(model, 2, count)[0]
        ]
    for before, after, _ in results:
        assert before == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)
        assert after != before  # trained in between
    assert sum(outputs for _, _, outputs in results) == count


# --- checkpoints ---


def train_and_save(rank: int, job: Job, folder: str) -> list[float]:
    engine, _ = build(job)
    batches = StepBatches(random_batches(job.model, 4, job.micro_batches * job.dp))
    losses = []
    for step in range(4):
        losses.append(float(engine.train_batch(batches)))
        if step == 1:
            engine.save_checkpoint(folder, tag="middle", client_state={"step": 2})
    return losses


def resume(rank: int, job: Job, folder: str) -> list[float]:
    engine, _ = build(job)
    path, state = engine.load_checkpoint(folder, tag="middle")
    assert path is not None and state is not None and state["step"] == 2
    batches = StepBatches(random_batches(job.model, 4, job.micro_batches * job.dp))
    batches.step = 2
    return [float(engine.train_batch(batches)) for _ in range(2)]


@pytest.mark.parametrize(
    ("schedule", "layout", "zero"),
    [
        ("1f1b", (2, 1, 1), 0),
        ("interleaved", (2, 1, 1), 1),
        ("bitpipe", (4, 1, 1), 0),
        ("bitpipe", (2, 2, 1), 1),
    ],
)
def test_resume_continues_bit_for_bit(
    ranks: Ranks, tmp_path: Path, schedule: str, layout: tuple[int, int, int], zero: int
) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
    settings = {"optimizer": adam, "zero_optimization": {"stage": zero, "reduce_bucket_size": 10**6}}
    model = dataclasses.replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)
    job = Job(schedule, *layout, micro_batches=4, model=model, deepspeed=settings)
    pool = ranks(job.world_size)
    straight = pool.run(train_and_save, job, str(tmp_path), timeout_s=120)
    assert pool.run(resume, job, str(tmp_path), timeout_s=120) == [losses[2:] for losses in straight]
    files = sorted(path.name for path in (tmp_path / "middle").glob("layer_*"))
    # One file a layer (and tensor-parallel rank), replicas written once; the tied head has none of its own.
    assert len(files) == (MODEL.num_layers + 3) * layout[1]


# --- traps of custom schedules: DeepSpeed's engine has one loss, one gradient buffer, one output shape ---


class Pair(nn.Module):
    """Takes and gives (float, int, float without gradient); the middle one counts layers."""

    def __init__(self, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(4) * 1.1)
            self.linear.bias.fill_(0.01)

    def forward(self, inputs: Any) -> Any:
        x, count, mask = (
            (inputs, torch.zeros(1, dtype=torch.int64), torch.ones_like(inputs)) if self.first else inputs
        )
        y = self.linear(x) * mask
        return y if self.last else (y, count + 1, mask.detach())


def train_tuples(rank: int, schedule: str, shapes: list[int]) -> tuple[list[float], list[Tensor]]:
    config = {
        **batch_of(schedule, 4 // get_schedule(schedule).placement(2).replicas),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2},
    }
    layers = [LayerSpec(Pair, first=i == 0, last=i == 7) for i in range(8)]
    module = PipelineModule(layers, config, loss_fn=squared_error, partition_method="uniform")
    engine, *_ = initialize(model=module, config=config, model_parameters=module.parameters())
    losses = [
        float(engine.train_batch(StepBatches([tuple_batches(step, shapes[step])])))
        for step in range(len(shapes))
    ]
    return losses, [p.detach().clone() for p in module.parameters()]


def squared_error(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).pow(2).mean()


def tuple_batches(step: int, length: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    # Micro-batches of one step differ in length too.
    return [
        (
            torch.randn(2, length + i, 4, generator=generator),
            torch.randn(2, length + i, 4, generator=generator),
        )
        for i in range(4)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tuples_ints_constants_and_changing_shapes(ranks2: RankPool, schedule: str) -> None:
    shapes = [3, 7, 1]
    results = ranks2.run(train_tuples, schedule, shapes)
    model = nn.Sequential(*(Pair(first=i == 0, last=i == 7) for i in range(8)))
    sgd, plain = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step, length in enumerate(shapes):
        losses = [squared_error(model(x), y) for x, y in tuple_batches(step, length)]
        loss = torch.stack(losses).mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        plain.append(loss.item())
        for rank_losses, _ in results:
            assert rank_losses[step] == pytest.approx(loss.item(), rel=1e-5)
    learned(plain, unless="every step has other samples and shapes")
    expected = [p.detach() for p in model.parameters()]
    found = [p for _, parameters in results for p in parameters]
    assert len(found) == get_schedule(schedule).placement(2).replicas * len(expected)
    for parameter in found:
        assert min(float((parameter - e).abs().max()) for e in expected if e.shape == parameter.shape) < 1e-5


class Tripwire(nn.Module):
    """Fails at its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the layer broke")
        return self.linear(x)


def fail_in_a_layer(rank: int) -> tuple[str, str]:
    """(error, notes) of a step in which a layer of rank 1 raises."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "ds_ext": {"schedule": "1f1b", "pipeline_parallel_size": 2, "transport_options": {"timeout_s": 3}},
    }
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(Tripwire)]
    module = PipelineModule(layers, config, loss_fn=squared_error, partition_method="uniform")
    engine, *_ = initialize(model=module, config=config, model_parameters=module.parameters())
    batches = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(4)]
    with pytest.raises((ValueError, TransportError)) as caught:
        engine.train_batch(StepBatches([batches]))
    return str(caught.value), "\n".join(caught.value.__notes__)


def test_a_failed_step_shows_the_grid_with_an_arrow(ranks: Ranks) -> None:
    pool = ranks(2)
    (waiting, waiting_at), (broken, broken_at) = pool.run(fail_in_a_layer)
    pool.close()  # its messages are left half-way
    assert broken == "the layer broke"
    assert "rank 1 (device 1 of its pipeline) failed in F2@1, step 1 (Tripwire 1):" in broken_at
    row, arrow = broken_at.splitlines()[-2:]
    assert row.startswith("device 1") and row.endswith("<-- ERROR HERE")
    assert row[arrow.index("^") :].startswith("F2@1")
    # The other rank waits for a gradient that never comes, and says so within its limit.
    assert "rank 0" in waiting and "rank 1" in waiting and "3" in waiting
    assert "stopped in RecvGrad 2@0 from device 1, step 1" in waiting_at
