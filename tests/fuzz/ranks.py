"""Training run of a job on the ranks of a pool."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import manual_seed, nn
from torch.distributed import get_rank

from ds_ext.engine import PipelineEngine, PipelineModule, initialize
from ds_ext.errors import ConfigError
from ds_ext.parallel.fbd import FORWARD_ROLE
from ds_ext.tensor_parallel import TensorParallel, create_tensor_parallel, shard_dim
from tests.layout_types import checked
from tests.reference import gather_shards

from .actions import Evaluate
from .data import EVALUATION, EvaluationBatches, Samples, StepBatches, WholeDataset, rank_batches
from .habit_layers import EXPERT_LAYERS
from .job import Job
from .reference import (
    LAYER_SEED,
    Result,
    distinct_parameters,
    halve,
    halved,
    make_optimizer,
    make_scheduler,
    parameter_groups,
)
from .scripts import KeptRates, Side
from .standard_layers import Mlp
from .zoo import ENDS

COMPILED = (nn.Linear, nn.LayerNorm, nn.RMSNorm, Mlp)  # layers that are compiled
WRAPPED = "_orig_mod."  # in the names of compiled layers


class Pipeline(Side):
    """Engine of a rank, with what a script sees of it."""

    def __init__(self, job: Job, part: int) -> None:
        self.job, self.part, self.result, self.memory, self.optimizer = job, part, Result(), {}, None
        layout = job.layouts[part]
        self.tp = (
            create_tensor_parallel(layout.ranks.groups()["tensor"]) if layout.tp > 1 else TensorParallel()
        )
        manual_seed(job.seed)
        config = job.config(part)
        with job.built():
            layers = job.layers(self.tp)
            if job.compiled in ("both", ("first", "second")[part]):
                layers = [_compiled(layer, index) for index, layer in enumerate(layers)]
                manual_seed(job.seed)  # the engine's seed too
            model = PipelineModule(
                layers,
                config,
                loss_fn=ENDS[job.end].loss(),
                partition_method=job.partition,
                activation_checkpoint_interval=job.checkpoint_interval,
            )
        if job.rank_seeds:
            manual_seed(job.seed + 100 * part + get_rank())
        self.whole = model
        self.modules = {
            index: module for stage in model.stages for index, module in model.stage_modules(stage).items()
        }
        for action in job.script:
            action.at_start(self)
        parameters = distinct_parameters(self.modules, job.passes_all)
        groups = parameter_groups(job, parameters, part)
        if not parameters:
            groups = (
                [{**groups[0], "params": model.placeholders}, *groups[1:]]
                if job.groups
                else model.placeholders
            )
        optimizer = make_optimizer(job, groups, part) if job.own_optimizer else None
        passes = job.decay_groups or job.groups or job.passes_all or job.adds_groups
        self.engine, self.optimizer, *_ = initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=groups if passes and optimizer is None else None,
            training_data=Samples(job) if job.data.endswith("dataset") else None,
            lr_scheduler=partial(make_scheduler, job) if job.scheduler in ("script", "lambdas") else None,
            config=config,
        )
        if job.compiled == "engine":
            self.engine.compile(backend="eager")

    # --- what scripts do ---

    def settle(self) -> None:
        self.engine.wait_for_weights()

    def eval_mode(self) -> None:
        self.engine.eval()

    def keep_rates(self) -> None:
        self.engine.lr_scheduler = KeptRates()

    def resize(self, micro_batches: int) -> None:
        self.engine.set_train_batch_size(micro_batches * self.job.micro_batch_size)

    def evaluate(self, sizes: Evaluate) -> None:
        job = self.job
        if sizes.samples:
            data: Any = WholeDataset(job, sizes.samples)
        else:
            data = EvaluationBatches(job, sizes.micro_batch_size or job.micro_batch_size)
        count = "all" if sizes.samples else sizes.micro_batches or None
        loss = self.engine.eval_batch(data, return_logits=sizes.logits, num_micro_batches=count)
        if sizes.logits:
            loss, outputs = loss
            first = self.engine.module.data_index * self.engine.current_schedule.micro_batches
            size = job.micro_batch_size
            for number, output in outputs.items():
                if (
                    not sizes.samples or (first + number) * size < sizes.samples
                ):  # others repeat the last sample
                    self.result.state[f"outputs of {sizes}.{first + number}"] = output.detach().clone()
        self.result.evaluations.append(float(loss))

    # --- steps ---

    def evaluate_after(self, step: int) -> None:
        """Evaluate if the job does so after this number of steps."""
        if self.job.evaluate_after == step:
            dataset = self.job.data.endswith("dataset")
            source: Any = Samples(self.job, EVALUATION) if dataset else StepBatches(self.job, EVALUATION)
            self.result.evaluations.append(float(self.engine.eval_batch(source)))

    def step(self, source: Any) -> None:
        """Train one step."""
        engine, result = self.engine, self.result
        result.losses.append(float(engine.train_batch(source)))
        norm = engine.get_global_grad_norm()
        result.norms.append(None if norm is None else float(norm))
        # The script itself makes other groups on each rank, or they are split by stages or experts.
        splits = self.job.decay_groups or self.job.overlap or {*self.job.blocks} & {*EXPERT_LAYERS}
        result.rates.append(None if splits else [float(rate) for rate in engine.get_lr()])
        if ENDS[self.job.end].additional:
            result.additional += map(float, (engine.agg_additional_losses or {}).values())

    def source(self, step: int) -> Any:
        """Return the argument of train_batch(), from a step on."""
        job, engine = self.job, self.engine
        if job.data.endswith("dataset"):
            return None
        if job.data == "batches":
            # load_checkpoint() sets its position.
            return StepBatches(job, step=step if job.restarts else 0)
        # An iterator on a forward rank has the micro-batches of all backward pipes of its group.
        layout = job.layouts[self.part]
        pipes = layout.placement.replicas if engine.module.role_name == FORWARD_ROLE else 1
        rank = engine.mpu.get_data_parallel_rank()

        def numbers(step: int) -> slice:
            count = job.micro_batches_at(step) // layout.pipes * pipes
            return slice(rank * count, (rank + 1) * count)

        return rank_batches(job, numbers, step, engine.is_first_stage())

    def load(self, folder: str) -> None:
        """Load what the first layout has saved."""
        how = self.job.resume_with
        if how == "own_file":
            state: dict[str, Any] = {}
            for path in Path(folder).glob("weights_*.pt"):
                state |= torch.load(path)
            for index, module in self.modules.items():
                own = {name: state[f"{index}.{name.replace(WRAPPED, '')}"] for name in module.state_dict()}
                module.load_state_dict(own)
            return
        self.engine.load_checkpoint(
            folder,
            load_module_strict=how != "not_strict",
            load_optimizer_states=how != "no_optimizer",
            load_module_only=how == "module_only",
        )


def _compiled(layer: Any, index: int) -> Any:
    """Return the compiled module of a spec, or the layer itself."""
    if not isinstance(layer, LayerSpec) or isinstance(layer, TiedLayerSpec) or layer.typename not in COMPILED:
        return layer
    manual_seed(LAYER_SEED + index)
    return torch.compile(layer.build(), backend="eager")


def train_on_rank(rank: int, job: Job, part: int, folder: str) -> Result:
    """Train the steps of a job's first or second layout, and check the types of tensors over its axes.

    Args:
        part: index in ``job.layouts``.
        folder: folder of the checkpoint that ends part 0 and begins part 1.
    """
    with checked():
        return _train(rank, job, part, folder)


def _train(rank: int, job: Job, part: int, folder: str) -> Result:
    pipeline = Pipeline(job, part)
    engine, result = pipeline.engine, pipeline.result
    first, last = (
        (0, job.steps) if job.resume is None else ((0, job.resume_after), (job.resume_after, job.steps))[part]
    )
    try:
        source = pipeline.source(first)
        if isinstance(source, StepBatches):
            engine.set_dataiterator(source)  # so that load_checkpoint() sets its position
        if part == 1:
            for action in job.script:
                if action.step < first:
                    action.again(pipeline)
            pipeline.load(folder)
        elif job.set_weights == "load":
            engine.module.load_state_dict(halved(engine.module.state_dict()))
        elif job.set_weights == "assign":
            halve(engine.module)
        if part == 0:
            pipeline.evaluate_after(0)
        if job.empty_first:
            _fail(engine)
        for step in range(first, last):
            for action in job.script:
                action.before_step(pipeline, step)
            pipeline.step(source)
            for action in job.script:
                action.after_step(pipeline, step)
            pipeline.evaluate_after(step + 1)
        if last < job.steps:
            for action in job.script:
                action.before_save(pipeline)
            if job.set_weights == "save":
                engine.wait_for_weights()
                engine.module.load_state_dict(halved(engine.module.state_dict()))
            if job.resume_with == "own_file":
                engine.wait_for_weights()
                engine.average_buffers()
                torch.save(_state(engine, pipeline.tp), Path(folder) / f"weights_{rank}.pt")
            else:
                engine.save_checkpoint(folder)
        else:
            for action in job.script:
                action.before_step(pipeline, last)
            engine.wait_for_weights()
            engine.average_buffers()  # all ranks together, as before an evaluation or a save
            if engine.role.in_checkpoints:
                result.state |= _state(engine, pipeline.tp)
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
                whole = f"{index - part}.{name.replace(WRAPPED, '')}{of_part}"
                for number, places in enumerate(engine.module.tied_rows):
                    if index == min(places) and places[index] == name:
                        whole = f"{index}.{name.rpartition('.')[0]}#{number}"
                state[whole] = gather_shards(value, dim, tp).clone()
    return state
