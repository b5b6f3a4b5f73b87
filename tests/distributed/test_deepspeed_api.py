"""Arguments, calls and patches of DeepSpeed's pipelines: the same results here, or one error."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from deepspeed.runtime.pipe.schedule import ForwardPass, OptimizerStep, ReduceGrads, TrainSchedule
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_ext
from ds_ext.config.job import load_config
from ds_ext.engine import PipelineEngine
from ds_ext.errors import ConfigError, DsExtError
from ds_ext.planner.job_plan import make_job_plan
from tests.losses import learned
from tests.precisions import needs
from tests.ranks import RankPool
from tests.selection import select

SGD = {"type": "SGD", "params": {"lr": 0.1}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
BATCH = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
}
STEPS = 3


def numbers(step: int, number: int) -> tuple[Tensor, Tensor]:
    x = torch.sin(torch.arange(8.0).view(2, 4) * (10 * step + number + 1))
    return x, x.square()


class Steps:
    """Eight micro-batches per step, by id."""

    def __init__(self) -> None:
        self.step = 0

    def get(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        return numbers(self.step, micro_batch)

    def advance(self, micro_batches: int) -> None:
        self.step += 1


def layers(count: int = 8) -> list[Any]:
    return [LayerSpec(nn.Linear, 4, 4) for _ in range(count)]


def chain(count: int = 8) -> nn.Sequential:
    """The layers in one process, with their initial weights."""
    built = []
    for index in range(count):
        torch.manual_seed(1234 + index)
        built.append(nn.Linear(4, 4))
    return nn.Sequential(*built)


def plain_losses(optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> list[float]:
    model, losses = chain(), []
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.stack(
            [nn.functional.mse_loss(model(x), y) for x, y in (numbers(step, n) for n in range(8))]
        )
        total.mean().backward()
        losses.append(total.mean().item())
        optimizer.step()
    return learned(losses)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def module(**arguments: Any) -> ds_ext.PipelineModule:
    return ds_ext.PipelineModule(
        layers(), loss_fn=nn.functional.mse_loss, partition_method="uniform", **arguments
    )


def engine_of(config: dict[str, Any] | None = None, **arguments: Any) -> PipelineEngine:
    model = module(**{"num_stages": 4, **arguments})
    json = BATCH | {"optimizer": SGD} if config is None else config
    return ds_ext.initialize(model=model, config=json, model_parameters=model.parameters())[0]


def trained(engine: PipelineEngine) -> list[float]:
    batches = Steps()
    return [float(engine.train_batch(batches)) for _ in range(STEPS)]


def config_of_an_engine(rank: int, config: dict[str, Any]) -> Any:
    engine = engine_of(config, schedule="bitpipe")
    deepspeed.checkpointing.configure(None, deepspeed_config=engine.config)
    return engine.config


@needs("bf16")
def test_the_config_of_an_engine_is_the_json_of_the_user(ranks4: RankPool) -> None:
    """Two data-parallel ranks have 4 micro-batches each, of which DeepSpeed on four ranks would have 2."""
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
    section = {"ds_ext": {"pipeline_parallel_size": 4, "schedule": "bitpipe"}}
    config = sizes | {"optimizer": ADAMW, "bf16": {"enabled": True}} | section
    assert ranks4.run(config_of_an_engine, config) == [config] * 4


# --- the JSON is optional, and both sides must agree ---


def train_without_json(rank: int, schedule: str | None) -> tuple[list[float], str]:
    model = module(num_stages=4, schedule=schedule)
    with pytest.raises(ConfigError):
        _ = model.plan  # the number of micro-batches is not known yet
    engine, *_ = ds_ext.initialize(
        model=model, config=BATCH | {"optimizer": SGD}, model_parameters=model.parameters()
    )
    assert model.plan.sizes.micro_batches == 8
    return trained(engine), engine.plan.schedule.name


@pytest.mark.parametrize("schedule", [None, "bitpipe", "zb_v"])
def test_a_module_without_a_json(ranks4: RankPool, schedule: str | None) -> None:
    expected = plain_losses(sgd)
    for losses, name in ranks4.run(train_without_json, schedule):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert name == (schedule or "1f1b")


def train_with_both(rank: int) -> tuple[list[float], dict[str, Any]]:
    """Each side sets keys that the other does not set."""
    model = module(
        config={"train_batch_size": 16, "optimizer": SGD, "ds_ext": {"max_nonfinite_losses": 3}},
        num_stages=4,
        schedule="interleaved",
        schedule_options={"chunks": 2},
    )
    config = BATCH | {"ds_ext": {"schedule": "interleaved", "eager_gradient_sync": False}}
    engine, *_ = ds_ext.initialize(model=model, config=config, model_parameters=model.parameters())
    settings = engine.plan.settings
    assert engine.plan.sizes.micro_batches == 8
    assert set(engine.parameters()) == set(model.parameters())
    return trained(engine), {**settings.model_dump(include={"max_nonfinite_losses", "eager_gradient_sync"})}


def test_keys_of_one_side_stand_for_both(ranks4: RankPool) -> None:
    expected = plain_losses(sgd)
    for losses, settings in ranks4.run(train_with_both):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert settings == {"max_nonfinite_losses": 3, "eager_gradient_sync": False}


def refused(action: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)


def contradictions(rank: int) -> list[str]:
    def initialized(given: dict[str, Any], **arguments: Any) -> str:
        model = module(**arguments)
        return refused(lambda: ds_ext.initialize(model=model, config=given))

    four: dict[str, Any] = {"ds_ext": {"pipeline_parallel_size": 4}}
    plan = make_job_plan(load_config(BATCH | {"ds_ext": {}}), 4)
    number: Any = 4  # DeepSpeed's second argument is num_stages
    column_major = ProcessTopology(axes=["data", "pipe"], dims=[2, 2])
    return [
        refused(lambda: module(config=four, num_stages=2)),
        refused(lambda: module(config=four, topology=PipeDataParallelTopology(2, 2))),
        refused(lambda: module(num_stages=2, topology=PipeDataParallelTopology(4, 1))),
        refused(lambda: module(topology=PipeDataParallelTopology(2, 1))),
        refused(lambda: module(topology=column_major)),
        refused(lambda: module(topology=ProcessTopology(axes=["pipe", "expert"], dims=[2, 2]))),
        refused(
            lambda: module(config=four | {"ds_ext": {"schedule": "zb_v"}}, schedule="bitpipe", num_stages=4)
        ),
        refused(lambda: module()),
        refused(lambda: module(config=plan, num_stages=4)),
        refused(lambda: module(config=number)),
        refused(lambda: module(num_stages=4)(torch.zeros(2, 4))),
        initialized(BATCH | {"ds_ext": {"schedule": "bitpipe"}}, num_stages=4),
        initialized(BATCH | {"gradient_clipping": 2.0}, num_stages=4, config={"gradient_clipping": 1.0}),
        initialized({}, num_stages=4),
    ]


def test_both_values_of_a_contradiction(ranks4: RankPool) -> None:
    found, *others = ranks4.run(contradictions)
    assert all(other == found for other in others)
    keys = (
        *("num_stages: ", "topology: ", "topology: ", "topology: ", "topology: ", "topology: ", "schedule: "),
        *(
            "config: ",
            "num_stages: ",
            "config: ",
            "PipelineModule: ",
            "ds_ext.schedule: ",
            "gradient_clipping: ",
            "train_batch_size: ",
        ),
    )
    for error, key in zip(found, keys, strict=True):
        assert error.startswith(key)
    assert "4" in found[0] and "2" in found[0]
    assert "'1f1b'" in found[11] and "'bitpipe'" in found[11]
    assert "1.0" in found[12] and "2.0" in found[12]


# --- position in the pipeline ---


def positions(rank: int, schedule: str) -> tuple[list[bool], list[int], int, int]:
    engine = engine_of(schedule=schedule, num_stages=None, topology=PipeModelDataParallelTopology(4, 1, 1))
    assert engine.is_pipe_parallel
    owners = [engine.grid.stage_to_global(stage) for stage in range(engine.num_stages)]
    held = all(
        (owners[stage] == rank) <= (stage in engine.module.stages) for stage in range(engine.num_stages)
    )
    assert held
    ends = [engine.is_first_stage(), engine.is_last_stage()]
    return ends, owners, engine.grid.get_data_parallel_rank(), engine.grid.get_pipe_parallel_rank()


@pytest.mark.parametrize(
    ("schedule", "first", "last", "owners_of_rank_3"),
    [
        ("1f1b", [0], [3], [0, 1, 2, 3]),
        ("zb_v", [0], [0], [0, 1, 2, 3, 3, 2, 1, 0]),
        ("bitpipe", [0, 3], [0, 3], [3, 2, 2, 3, 3, 2, 2, 3]),
        ("chimera", [0, 3], [0, 3], [3, 2, 2, 3]),
    ],
)
def test_first_and_last_stages(
    ranks4: RankPool, schedule: str, first: list[int], last: list[int], owners_of_rank_3: list[int]
) -> None:
    found = ranks4.run(positions, schedule)
    assert [rank for rank in range(4) if found[rank][0][0]] == first
    assert [rank for rank in range(4) if found[rank][0][1]] == last
    assert found[3][1] == owners_of_rank_3


# --- data ---


def train_with_batch_fn(rank: int) -> tuple[list[float], str]:
    """The first tensor-parallel rank reads the data, and ``batch_fn`` sends it to the others, as in gpt-neox."""
    engine = engine_of(num_stages=None, topology=PipeModelDataParallelTopology(2, 2, 1))
    group, tensor_rank = engine.grid.get_slice_parallel_group(), engine.grid.get_slice_parallel_rank()
    missing = refused(engine_of().train_batch)

    def batch_fn(batch: Any) -> Any:
        boxes = [batch]
        torch.distributed.broadcast_object_list(boxes, src=rank - tensor_rank, group=group)
        return boxes[0]["x"], boxes[0]["y"]

    engine.set_batch_fn(batch_fn)
    losses = []
    for step in range(STEPS):
        pairs = (numbers(step, number) for number in range(8))
        data = iter([{"x": x, "y": y} for x, y in pairs]) if tensor_rank == 0 else None
        losses.append(float(engine.train_batch(data)))
    return losses, missing


def test_data_of_one_rank_reaches_the_others_through_batch_fn(ranks4: RankPool) -> None:
    expected = plain_losses(sgd)
    for losses, missing in ranks4.run(train_with_batch_fn):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert missing.startswith("data_iter: ")


# --- evaluation ---


def evaluations(rank: int, schedule: str) -> list[Any]:
    engine = engine_of(schedule=schedule)
    return [
        engine.eval_batch(Steps(), compute_loss=False),
        engine.eval_batch(Steps(), compute_loss=False, reduce_output=None),
        engine.eval_batch(Steps(), reduce_output=None, bcast_loss=False),
        float(engine.eval_batch(Steps(), bcast_loss=False)),
        refused(lambda: engine.eval_batch(Steps(), reduce_output=None)),
        refused(lambda: engine.eval_batch(Steps(), reduce_output="sum")),
    ]


@pytest.mark.parametrize("schedule", select(["1f1b", "bitpipe", "chimera", "zb_v"], ["1f1b", "bitpipe"]))
def test_evaluation_without_a_loss(ranks4: RankPool, schedule: str) -> None:
    model = chain()
    with torch.no_grad():
        outputs = [model(numbers(0, number)[0]) for number in range(8)]
        losses = [float(nn.functional.mse_loss(outputs[n], numbers(0, n)[1])) for n in range(8)]
    parts: list[Tensor] = []
    own_losses: list[float] = []
    for mean, several, of_each, loss, *errors in ranks4.run(evaluations, schedule):
        assert loss == pytest.approx(sum(losses) / 8, rel=1e-6)
        assert [error.partition(":")[0] for error in errors] == ["bcast_loss", "reduce_output"]
        assert (mean is None) == (several is None) == (of_each is None)
        if mean is not None:
            torch.testing.assert_close(mean, torch.stack(outputs).mean(0))
            parts += several
            own_losses += map(float, of_each)
    assert sorted(own_losses) == pytest.approx(sorted(losses), rel=1e-6)
    torch.testing.assert_close(torch.stack(parts).sum(0), torch.stack(outputs).sum(0))


# --- optimizers and handlers of a script ---


def train_with_late_optimizer(rank: int, schedule: str, how: str) -> list[float]:
    error = refused(lambda: engine_of(BATCH | {"zero_optimization": {"stage": 1}}, schedule=schedule))
    assert error.startswith("optimizer: ")  # DeepSpeed's ZeRO needs it at the construction
    engine = engine_of(BATCH, schedule=schedule)
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    if how == "assigned":
        engine.optimizer = torch.optim.AdamW(parameters, lr=0.01)
    else:
        engine._configure_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=0.01), parameters)
    return trained(engine)


@pytest.mark.parametrize(("schedule", "how"), [("bitpipe", "assigned"), ("1f1b", "configured")])
def test_an_optimizer_made_after_initialize(ranks4: RankPool, schedule: str, how: str) -> None:
    expected = plain_losses(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    for losses in ranks4.run(train_with_late_optimizer, schedule, how):
        assert losses == pytest.approx(expected, rel=1e-5)


def replace_optimizer(rank: int, config: dict[str, Any]) -> str:
    engine = engine_of(BATCH | {"optimizer": ADAMW} | config, schedule="bitpipe")
    engine.optimizer = torch.optim.AdamW(engine.module.parameters(), lr=0.01)
    return refused(lambda: trained(engine))


@pytest.mark.parametrize(
    "config", [{"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}], ids=str
)
def test_an_optimizer_with_fp32_weights_or_shards_is_not_replaced(
    ranks4: RankPool, config: dict[str, Any]
) -> None:
    for error in ranks4.run(replace_optimizer, config):
        assert error.startswith("optimizer: ") and "AdamW" in error


def train_with_patches(rank: int) -> tuple[list[float], list[str], list[str]]:
    calls: list[str] = []
    own = {kind: PipelineEngine._INSTRUCTION_MAP[kind] for kind in (ReduceGrads, OptimizerStep)}

    def reduce(engine: PipelineEngine) -> None:
        calls.append("reduce")
        own[ReduceGrads](engine)

    def step(engine: PipelineEngine, lr_kwargs: Any = None) -> None:
        calls.append("step")
        own[OptimizerStep](engine)

    def by_position(engine: PipelineEngine, buffer_id: int, stage: int, micro_batch: int) -> None:
        PipelineEngine._INSTRUCTION_MAP[ForwardPass](engine, buffer_id, stage, micro_batch)

    def forward(engine: PipelineEngine, buffer_id: int) -> None:
        raise AssertionError("must not be called")

    theirs = DeepSpeedPipelineEngine._INSTRUCTION_MAP
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(theirs, ReduceGrads, reduce)
        engine = engine_of(schedule="bitpipe")
        # A reduction before the script's handler would not be the script's.
        assert engine.update.reduction is None
        patch.setattr(
            engine,
            "_INSTRUCTION_MAP",
            {**PipelineEngine._INSTRUCTION_MAP, OptimizerStep: step, ForwardPass: by_position},
            raising=False,
        )
        losses = trained(engine)
        patch.setitem(engine._INSTRUCTION_MAP, ForwardPass, PipelineEngine._INSTRUCTION_MAP[ForwardPass])
        patch.setitem(theirs, ForwardPass, forward)
        errors = [refused(lambda: engine.train_batch(Steps()))]
    errors.append(refused(lambda: engine._exec_schedule(TrainSchedule(8, 4, 0))))
    engine.micro_batches = 2
    errors.append(refused(lambda: engine.train_batch(Steps())))
    return losses, calls, errors


def test_handlers_of_a_script(ranks4: RankPool) -> None:
    expected = plain_losses(sgd)
    for losses, calls, errors in ranks4.run(train_with_patches):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert calls == ["reduce", "step"] * STEPS
        assert [error.partition(":")[0] for error in errors] == [
            "_INSTRUCTION_MAP[ForwardPass]", "schedule", "micro_batches",
        ]  # fmt: skip


# --- recomputation ---


def train_with_checkpoints(rank: int, schedule: str, function: Any) -> tuple[list[float], str]:
    arguments: dict[str, Any] = {
        "num_stages": 2,
        "schedule": schedule,
        "activation_checkpoint_interval": 2,
        "activation_checkpoint_func": function,
        "partition_method": "uniform",
    }
    model = ds_ext.PipelineModule(layers(), loss_fn=nn.functional.mse_loss, **arguments)
    config = BATCH | {"optimizer": SGD}
    engine, *_ = ds_ext.initialize(model=model, config=config, model_parameters=model.parameters())
    embedded = ds_ext.PipelineModule(
        [LayerSpec(nn.Embedding, 4, 4), *layers(7)], loss_fn=nn.functional.mse_loss, **arguments
    )
    if rank == 1:  # does not hold the embedding
        return trained(engine), ""
    losses = trained(engine)
    return losses, refused(lambda: embedded.forward_stage(0, torch.zeros(2, dtype=torch.int64), 0, 0))


REENTRANT = functools.partial(checkpoint, use_reentrant=True)


@pytest.mark.parametrize(
    ("schedule", "function"),
    select(
        [*itertools.product(["1f1b", "zb_h1", "bitpipe"], [REENTRANT, deepspeed.checkpointing.checkpoint])],
        [("1f1b", REENTRANT), ("zb_h1", deepspeed.checkpointing.checkpoint), ("zb_h1", REENTRANT)],
    ),
)
def test_reentrant_recomputation(ranks2: RankPool, schedule: str, function: Any) -> None:
    expected = plain_losses(sgd)
    found = ranks2.run(train_with_checkpoints, schedule, function)
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert found[0][1].startswith("activation_checkpoint_func: ")


class Frozen(nn.Linear):
    """Linear layer that is not trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)


def lose_the_gradient_of_a_tie(rank: int) -> None:
    """Recompute a tied embedding and a frozen layer in one block."""

    def embed(table: nn.Embedding, ids: Tensor) -> Tensor:
        return table(ids)

    tied = TiedLayerSpec("table", nn.Embedding, 4, 4, forward_fn=embed)
    layers = [tied, LayerSpec(Frozen, 4, 4), *(LayerSpec(nn.Linear, 4, 4) for _ in range(2))]
    model = ds_ext.PipelineModule(
        layers,
        num_stages=2,
        loss_fn=lambda outputs, labels: (outputs - labels).square().mean(),
        partition_method="uniform",
        activation_checkpoint_interval=2,
        activation_checkpoint_func=REENTRANT,
    )
    engine = ds_ext.initialize(
        model=model, config=BATCH | {"optimizer": SGD}, model_parameters=model.parameters()
    )[0]
    batches = ((torch.arange(4), torch.zeros(4, 4)) for _ in range(8))
    engine.train_batch(batches)


def test_a_tied_embedding_does_not_lose_its_gradient(ranks2: RankPool) -> None:
    with pytest.raises(DsExtError, match="activation_checkpoint_func: Embedding"):
        ranks2.run(lose_the_gradient_of_a_tie, timeout_s=60)


# --- layer files of the module, and data of several ranks ---


def save_and_load(rank: int, folder: str) -> tuple[list[str], bool]:
    engine = engine_of(schedule="bitpipe")
    engine.train_batch(Steps())
    engine.module.save_state_dict(folder, engine.checkpoint_engine)
    torch.distributed.barrier()
    loss = float(engine.eval_batch(Steps()))
    other = engine_of(schedule="zb_v")
    assert float(other.eval_batch(Steps())) != pytest.approx(loss, rel=1e-3)
    other.module.load_state_dir(folder, other.checkpoint_engine)
    return sorted(os.listdir(folder)), float(other.eval_batch(Steps())) == pytest.approx(loss, rel=1e-6)


def test_layer_files_hold_every_stage(ranks4: RankPool, tmp_path: Path) -> None:
    for files, equal in ranks4.run(save_and_load, str(tmp_path)):
        assert len(files) == 8 and equal


def warnings_of(rank: int, kind: str, method: str) -> list[tuple[str, int, int]]:
    engine = engine_of(schedule="bitpipe")
    own = 4 * engine.grid.get_data_parallel_rank()
    first = 0 if kind == "shared" else own

    def batch(number: int) -> tuple[Tensor, Tensor]:
        inputs, labels = numbers(0, first + number)
        if kind == "constant inputs":
            return torch.zeros_like(inputs), torch.zeros_like(labels)
        return (numbers(0, number)[0], labels) if kind == "own labels" else (inputs, labels)

    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            logging.getLogger("ds_ext.engine.first_batch"),
            "warning",
            lambda *values: found.append(values[1:]),
        )
        getattr(engine, method)(iter([batch(number) for number in range(4)]))
    return found


@pytest.mark.parametrize("method", ["train_batch", "eval_batch"])
def test_ranks_that_read_the_same_samples(ranks4: RankPool, method: str) -> None:
    for kind in ("own", "own labels", "constant inputs"):
        assert ranks4.run(warnings_of, kind, method) == [[], [], [], []]
    assert ranks4.run(warnings_of, "shared", method) == [[(method, 0, 1)], [], [], []]
