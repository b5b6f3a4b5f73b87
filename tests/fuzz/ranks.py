"""Training run of a job on the ranks of a pool."""

from __future__ import annotations

from typing import Any

from torch import manual_seed, nn
from torch.distributed import get_rank

from ds_ext.engine import PipelineEngine, PipelineModule, initialize
from ds_ext.errors import ConfigError
from ds_ext.parallel.fbd import FORWARD_ROLE
from ds_ext.tensor_parallel import TensorParallel, create_tensor_parallel, shard_dim
from tests.reference import gather_shards

from .data import EVALUATION, Samples, StepBatches, rank_batches
from .job import Job, Layout
from .reference import Result, halve, halved, make_optimizer, make_scheduler, parameter_groups
from .zoo import ENDS


def train_on_rank(rank: int, job: Job, part: int, folder: str) -> Result:
    """Train the steps of a job's first or second layout.

    Args:
        part: index in ``job.layouts``.
        folder: folder of the checkpoint that ends part 0 and begins part 1.
    """
    layout = job.layouts[part]
    engine, tp = _build(job, part)
    result = Result()
    first, last = (
        (0, job.steps) if job.resume is None else ((0, job.resume_after), (job.resume_after, job.steps))[part]
    )
    try:
        source = _source(job, layout, engine, first)
        if isinstance(source, StepBatches):
            engine.set_dataiterator(source)  # so that load_checkpoint() sets its position
        if part == 1:
            engine.load_checkpoint(folder)
        elif job.set_weights == "load":
            engine.module.load_state_dict(halved(engine.module.state_dict()))
        elif job.set_weights == "assign":
            halve(engine.module)
        if part == 0:
            _evaluate(job, 0, engine, result)
        if job.empty_first:
            _fail(engine)
        for step in range(first, last):
            result.losses.append(float(engine.train_batch(source)))
            norm = engine.get_global_grad_norm()
            result.norms.append(None if norm is None else float(norm))
            _evaluate(job, step + 1, engine, result)
        if last < job.steps:
            if job.set_weights == "save":
                engine.wait_for_weights()
                engine.module.load_state_dict(halved(engine.module.state_dict()))
            engine.save_checkpoint(folder)
        else:
            engine.wait_for_weights()
            engine.average_buffers()  # all ranks together, as before an evaluation or a save
            if engine.role.in_checkpoints:
                result.state = _state(engine, tp)
    finally:
        engine.transport.close()
    return result


def _fail(engine: PipelineEngine) -> None:
    """Train with an empty iterator, which is an error."""
    batches = engine.batches
    try:
        engine.train_batch(iter(()))
    except ConfigError:
        engine.batches = batches
    else:
        raise AssertionError("train_batch() accepts an empty iterator")


def _build(job: Job, part: int) -> tuple[PipelineEngine, TensorParallel]:
    layout, config = job.layouts[part], job.config(part)
    tp = create_tensor_parallel(layout.ranks.groups()["tensor"]) if layout.tp > 1 else TensorParallel()
    manual_seed(job.seed)
    with job.built():
        model = PipelineModule(
            job.layers(tp),
            config,
            loss_fn=ENDS[job.end].loss(),
            partition_method=job.partition,
            activation_checkpoint_interval=job.checkpoint_interval,
        )
    if job.rank_seeds:
        manual_seed(job.seed + 100 * part + get_rank())
    parameters = _trained(model)
    optimizer = make_optimizer(job, parameters, part) if job.own_optimizer else None
    groups = parameter_groups(job, parameters) if job.decay_groups and optimizer is None else None
    engine, *_ = initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=groups,
        training_data=Samples(job) if job.data.endswith("dataset") else None,
        lr_scheduler=make_scheduler if job.scheduler == "script" else None,
        config=config,
    )
    return engine, tp


def _trained(model: PipelineModule) -> list[nn.Parameter]:
    """Return the trained parameters of this rank, or its placeholder."""
    return [p for p in model.parameters() if p.requires_grad]


def _source(job: Job, layout: Layout, engine: PipelineEngine, step: int) -> Any:
    """Return the argument of train_batch()."""
    if job.data.endswith("dataset"):
        return None
    if job.data == "batches":
        return StepBatches(job)
    # An iterator on a forward rank has the micro-batches of all backward pipes of its group.
    forward = engine.module.role_name == FORWARD_ROLE
    count = job.micro_batches // layout.pipes * (layout.placement.replicas if forward else 1)
    begin = engine.mpu.get_data_parallel_rank() * count
    return rank_batches(job, slice(begin, begin + count), step, engine.is_first_stage())


def _evaluate(job: Job, step: int, engine: PipelineEngine, result: Result) -> None:
    if job.evaluate_after == step:
        dataset = job.data.endswith("dataset")
        source: Any = Samples(job, EVALUATION) if dataset else StepBatches(job, EVALUATION)
        result.evaluations.append(float(engine.eval_batch(source)))


def _state(engine: PipelineEngine, tp: TensorParallel) -> dict[str, Any]:
    """Return parameters and persistent buffers by "layer.name", gathered over tensor-parallel ranks.

    Those of a part of the head, and the rows of an embedding that is tied to it, are called "layer.name#part".
    """
    state = {}
    for stage in engine.module.stages:
        for index, module in engine.module.stage_modules(stage).items():
            parameters = dict(module.named_parameters(remove_duplicate=False))
            part, parts = engine.module.head_part(index)
            for name, value in module.state_dict().items():
                dim = shard_dim(parameters[name]) if name in parameters else None
                of_part = f"#{part}" if parts > 1 else ""
                whole = f"{index - part}.{name}{of_part}"
                for number, places in enumerate(engine.module.tied_rows):
                    if index == min(places) and places[index] == name:
                        whole = f"{index}.{name.rpartition('.')[0]}#{number}"
                state[whole] = gather_shards(value, dim, tp).clone()
    return state
