"""DeepSpeed PipelineModule with several stages per rank.

DeepSpeed's module builds one contiguous range of layers. This one builds every stage that the placement assigns to the
rank, in ascending order. Replicas then have the same parameters in the same order, because gradient buckets and ZeRO
partitions match by position.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol, Self, SupportsIndex

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.module import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch.distributed import ProcessGroup

from ..config.job import DsExtConfig, JobConfig
from ..errors import ConfigError
from ..launch.job_facts import checksum, file_facts, setting_facts
from ..launch.roll_call import Facts, compare, one_refusal
from ..parallel.fbd import FORWARD_ROLE
from ..parallel.layout import ParallelLayout
from ..pipe_schedules.ops import BACKWARD, FORWARD
from ..planner.job_plan import JobPlan
from ..tensor_parallel import KeyedLayers, TensorParallel, building_for, is_sharded
from .all_ranks import on_all_ranks
from .contracts import AdaptedLayer, additional_losses
from .deepspeed_api.device import select_device
from .deepspeed_api.names import require_built, require_names
from .deepspeed_api.recompute import CheckpointFunction, checkpoint_function, run_with_recompute
from .deepspeed_api.topology import require_rank_order, topology_sizes
from .grid import FoldedTopology, grid_of_role, on_hosts
from .module_plan import (
    head_parts,
    layer_description,
    layer_name,
    plan_of_module,
    require_auxiliary_loss,
    require_shards,
)
from .placeholders import add_placeholder, has_trained
from .ties.functions import require_visible_parameters
from .ties.layered_module import stage_of
from .ties.separated import divide_tied_embedding, join_kinds, join_tied_rows, separate_kinds
from .ties.shared import find_shared, index_shared
from .ties.tied_layers import index_tied_modules, require_whole_ties, tied_weights
from .types import Batch, Function, Json, Layer, Record
from .wrappers import let_names_be_plain, plain_name

logger = logging.getLogger(__name__)


class Clock(Protocol):
    """Step and global micro-batch of the next forwards, for layers that draw random numbers."""

    def set(self, step: int, micro_batch: int) -> None: ...


# Attributes that a copy of the module shares with it.
_SHARED = ("_plan", "_topo", "_grid", "_layer_specs", "_head_specs", "clock", "loss_fn", "world_group")


class Unpicklable:
    """Base class of the module and the engine, whose process groups exist in this process only."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__}: has process groups, which cannot be pickled (got a call of torch.save, pickle or "
            f"copy). Save engine.module.state_dict() or use engine.save_checkpoint(), and copy engine.module instead "
            f"of the engine."
        )

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        """Raise ConfigError. Otherwise DeepSpeed's engine would return a copy of its module."""
        self.__reduce_ex__(2)

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied


class PipelineModule(DeepSpeedPipelineModule, Unpicklable):
    """Layers divided into the stages of a schedule's placement.

    Takes the arguments of :class:`deepspeed.pipe.PipelineModule`, and a schedule. The schedule and the sizes come from
    arguments, from the ``"ds_ext"`` section of ``config``, or from both if they agree.

    Args:
        layers: LayerSpecs, TiedLayerSpecs, modules or functions; the output of each is the input of the next. With
            ``vocabulary_parallel_head``, the last one has ``in_parts``, see :func:`.module_plan.head_parts`.
        config: DeepSpeed JSON (path or dict), or the job plan built from it. None: the JSON of the command line's flag
            ``--deepspeed_config``, or no JSON.
        num_stages: number of devices in a pipeline group, ``pipeline_parallel_size`` in the JSON.
        topology: DeepSpeed topology with the axes pipe, data and model, as an alternative to ``num_stages``. It must
            number the ranks as ``rank_order`` in the JSON; the default is the order of PipeModelDataParallelTopology.
        schedule: ``schedule`` in the JSON; default ``1f1b``.
        schedule_options: ``schedule_options`` in the JSON.
        loss_fn: ``loss_fn(outputs, labels)``. Returns the mean over the micro-batch, a pair (sum, count), or name ->
            pair (:mod:`.losses.local`).
        clock: receives the step and the global micro-batch before each forward and each recomputation.
        partition_method: DeepSpeed's ``uniform``, ``parameters`` or ``type:<regex>``; or the boundaries, ``[0, 3, 5,
            ...]``: stage s holds the layers ``boundaries[s]`` to ``boundaries[s + 1] - 1``.
        seed_layers: before each layer is built, seed the generator from the layer's global index. Initial weights then
            depend neither on the schedule nor on the sizes. (DeepSpeed's default is False.)
        seed_fn: called with the seed; None: torch.manual_seed.
        activation_checkpoint_func: ``func(run, *inputs)`` that recomputes layers in the backward; None:
            torch.utils.checkpoint without reentrance.
        **kwargs: further arguments of DeepSpeed's PipelineModule. ``dynamic_shape`` has no effect, because each message
            carries its shapes.

    Raises:
        ConfigError: neither arguments nor JSON set the number of stages, arguments contradict the JSON, the world size
            does not fit the sizes, there are fewer layers than stages, a tied layer trains more than its tied weights,
            or layers share parameters in a way that depends on the schedule.

    Attributes:
        layer_names: one name per layer of the whole model, for the printed plan.
        num_model_layers: number of layers of the whole model. A head in parts is one layer.
        plan_is_given: the module was built from a job plan, which its script prints.
        random_seed: seed of the keys from which layers draw: initial seed of torch on rank 0 in ``initialize``, or the
            seed of the loaded checkpoint.
        group_sources: with ``overlap_across_steps``, the script's parameter group of each group of the optimizer.
    """

    group_sources: Sequence[int] = ()
    keeps_modes = False  # during a training step
    _before_eval: Sequence[torch.nn.Module] = ()

    def __init__(
        self,
        layers: Iterable[Layer],
        config: str | Json | JobPlan | None = None,
        *,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        schedule: str | None = None,
        schedule_options: Json | None = None,
        loss_fn: Function | None = None,
        clock: Clock | None = None,
        partition_method: str | Sequence[int] = "parameters",
        seed_layers: bool = True,
        seed_fn: Callable[[int], object] | None = None,
        activation_checkpoint_func: CheckpointFunction | None = None,
        **kwargs: object,
    ) -> None:
        """Build the stages of this rank; see the class for the arguments."""
        require_names("deepspeed", "torch", "python")
        select_device()
        arguments: list[tuple[str, str, object]] = [
            ("num_stages", "pipeline_parallel_size", num_stages),
            *topology_sizes(topology),
            ("schedule", "schedule", schedule),
            ("schedule_options", "schedule_options", schedule_options),
        ]
        with one_refusal() if dist.is_initialized() else contextlib.nullcontext():
            layers = list(layers)
            plan = plan_of_module(config, arguments, len(layers))
            settings, placement = plan.settings, plan.layout.placement
            require_rank_order(topology, plan.layout)
            require_visible_parameters(layers, loss_fn)
            require_shards(layers, plan, loss_fn)
            require_auxiliary_loss(settings, loss_fn)
            self._head_specs = head_parts(layers, loss_fn, placement.head_parts)
            body, self.tied_rows = layers, list[dict[int, str]]()
            if self._head_specs:
                body, self.tied_rows = divide_tied_embedding(layers, placement.head_parts)
            body, self.tied_kinds = separate_kinds(body)
            if len(body) < placement.stages:
                raise ConfigError(
                    f"layers: {plan.schedule.name} has {placement.stages} stages on {placement.devices_per_pipe} "
                    f"devices (got {len(body)} layers{' before the head' * bool(self._head_specs)}). Use at least "
                    f"{placement.stages} layers, a smaller pipeline_parallel_size, or a schedule with fewer stages."
                )
        seeds = {"seed_layers": seed_layers, "base_seed": kwargs.get("base_seed")}
        compare(_facts(settings, layers, {"partition_method": partition_method, **seeds}))
        self.num_model_layers = len(layers)
        self.layer_names = [layer_name(layer, index) for index, layer in enumerate(layers)]
        self.plan_is_given = isinstance(config, JobPlan)
        self.random_seed = torch.initial_seed()
        self.clock = clock
        layout = on_hosts(plan.layout, settings.fbd.forward_hosts)
        self._plan = replace(plan, layout=layout)
        self.role_name = layout.role(dist.get_rank())
        self.device_index, self.data_index, _ = layout.coordinates(dist.get_rank())
        with _logged_prints(), grid_of_role(layout), torch.random.fork_rng(enabled=seed_layers):
            super().__init__(
                layers=body,
                topology=FoldedTopology(layout, self.role_name),
                loss_fn=loss_fn,
                partition_method=partition_method,
                seed_layers=seed_layers,
                seed_fn=seed_fn or _seed,
                activation_checkpoint_func=checkpoint_function(activation_checkpoint_func),
                **kwargs,
            )
        require_built(self)
        self._mark_shards()
        for named in {id(m): m for stage in self.stages for m in self.stage_modules(stage).values()}.values():
            let_names_be_plain(named)
        let_names_be_plain(self)
        _number_by_stage(self)
        self.placeholders: list[torch.nn.Parameter] = []
        if not has_trained(self.parameters()):
            add_placeholder(self)  # for an optimizer that the script makes of the trained parameters

    def _mark_shards(self) -> None:
        """Mark sharded parameters for the norms of DeepSpeed. Warn if the tensor-parallel ranks share nothing."""
        sharded = list(filter(is_sharded, self.parameters()))
        if self.layout.tensor_parallel_size > 1:
            for parameter in sharded:
                parameter.model_parallel = True  # pyright: ignore[reportAttributeAccessIssue] read by norms
        tp, has_weights = self._tensor_parallel(), any(p.dim() > 1 for p in self.parameters())
        if tp.size > 1 and tp.rank == self.data_index == 0 and has_weights and not sharded:
            logger.warning(
                f"tensor_parallel_size: no weight of device {self.device_index} is divided (got {tp.size} ranks, which "
                f"compute the same). Use layers of ds_ext.tensor_parallel, or from_transformers(), or size 1."
            )

    def layer_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the parameters of this rank without placeholders."""
        ids = set(map(id, self.placeholders))
        return (parameter for parameter in self.parameters() if id(parameter) not in ids)

    @property
    def plan(self) -> JobPlan:
        """The job plan. Raises ConfigError before initialize() if the module has no batch size."""
        if isinstance(self._plan, JobPlan):
            return self._plan
        raise ConfigError(
            "plan: the number of micro-batches is unknown (got a PipelineModule without batch sizes). Call "
            "ds_ext.initialize(model=model, config=...) first."
        )

    @property
    def job(self) -> JobConfig:
        """The JSON and the arguments of this module."""
        return self._plan.job

    def complete_plan(self, job: JobConfig) -> None:
        """Complete the plan with the batch sizes of a job. Raises the errors of :meth:`.StagePlan.complete`."""
        self._plan = self._plan.complete(job)

    @property
    def layout(self) -> ParallelLayout:
        """Global rank of every (device, data-parallel index, tensor-parallel index)."""
        return self._plan.layout

    @property
    def num_stages(self) -> int:
        """Number of stages of the model, over all devices."""
        return self.layout.placement.stages

    @num_stages.setter
    def num_stages(self, value: int) -> None:
        """Ignore the pipe size of the folded grid, which DeepSpeed's constructor sets."""

    # --- building ---

    def _partition_layers(self, method: str | Sequence[int] = "parameters") -> None:
        """Divide the layers into the placement's stages; the parent would use the grid's pipe size."""
        if isinstance(method, str):
            super()._partition_layers(method)
        else:
            self.parts = list(method)

    def _check_parts(self) -> None:
        """Raise ConfigError for boundaries that are not those of the placement's stages.

        A subclass may override ``_partition_layers``, so this is checked after it.
        """
        stages = self.num_stages
        if len(self.parts) != stages + 1 or self.parts[0] != 0 or self.parts[-1] != self._num_layers:
            raise ConfigError(
                f"partition_method: {stages} stages need {stages + 1} boundaries from 0 to the number of layers, "
                f"{self._num_layers} (got {self.parts}). Use uniform, or different boundaries."
            )
        empty = [stage for stage in range(stages) if self.parts[stage] >= self.parts[stage + 1]]
        if empty:
            raise ConfigError(
                f"partition_method: stage {empty[0]} of {stages} has no layers (got {self.parts}). Use uniform, or "
                f"fewer stages."
            )

    def _count_layer_params(self) -> list[int]:
        """Return the parameters of each layer. DeepSpeed would build every LayerSpec on every rank to count them."""
        counts = [AdaptedLayer(spec).num_parameters for spec in self._layer_specs]
        known = [count for count in counts if count is not None]
        return known if len(known) == len(counts) else super()._count_layer_params()

    def _build(self) -> None:
        self.parts = [int(part) for part in self.parts]  # from numpy integers, which are not valid seeds
        self._check_parts()
        # Every part of a head is a layer and a stage behind those of the body.
        self._layer_specs = [*self._layer_specs, *self._head_specs]
        self._num_layers = len(self._layer_specs)
        self.parts += range(self.parts[-1] + 1, self._num_layers + 1)
        self.stages = self.layout.placement.stages_of(self.device_index)
        self.stage_funcs: dict[int, list[Function]] = {}
        tp = self._tensor_parallel()
        with building_for(tp, self._plan.settings.sequence_parallel):
            # The trial of shards refuses layers of some ranks only.
            _ = self._build_stages() if tp.size == 1 else on_all_ranks(self._build_stages)
        self._activate(self.stages[0])

    def _build_stages(self) -> None:
        for stage in self.stages:
            self._set_bounds(self.parts[stage], self.parts[stage + 1])
            super()._build()
            self.stage_funcs[stage], self.forward_funcs = self.forward_funcs, []

    def _tensor_parallel(self) -> TensorParallel:
        size, (_, _, rank) = self.layout.tensor_parallel_size, self.layout.coordinates(dist.get_rank())
        if size == 1 or self.layout.placement.forward_devices:  # forward ranks may merge the shards
            return TensorParallel()
        return TensorParallel(rank, size, self.mpu().get_slice_parallel_group())

    def head_part(self, index: int) -> tuple[int, int]:
        """Return the part of the head that a layer is, and the number of parts; (0, 1) for other layers."""
        first, parts = self.num_model_layers - 1, len(self._head_specs)
        return (index - first, parts) if parts and index >= first else (0, 1)

    def stage_owner(self, layer_idx: int) -> int:
        """Return the folded pipeline coordinate that holds a layer. DeepSpeed uses it to find ties."""
        return self.pipe_coordinate(stage_of(self, layer_idx))

    def pipe_coordinate(self, stage: int) -> int:
        """Return the folded pipeline coordinate that holds a stage."""
        kind = FORWARD if self.role_name == FORWARD_ROLE else BACKWARD
        return self.topology().folded_stage(self.layout.placement.device(kind, stage, 0))

    def _index_tied_modules(self) -> dict[str, Record]:
        """Return the ties that need communication. In a V placement, both ends of a tie are on the same rank."""
        require_whole_ties(self)
        join_tied_rows(self)
        self.joined = join_kinds(self)
        self.shared = find_shared(self)
        return index_tied_modules(self) | index_shared(self)

    def get_tied_weights_and_groups(self) -> list[tuple[torch.nn.Parameter, ProcessGroup]]:
        """Return (parameter, process group) for each trained parameter whose gradients are summed over ranks."""
        return [(weight, tie["group"]) for weight, tie in self._tied_weights() if weight.requires_grad]

    def _synchronize_tied_weights(self) -> None:
        """Send the tied weights, frozen weights and buffers of each tie from its first rank to the others."""
        with torch.no_grad():
            for tie in self.tied_comms.values():
                layer = tie["module"]
                for tensor in (*layer.parameters(), *layer.buffers()):
                    sent = tensor.detach().contiguous()
                    dist.broadcast(sent, src=tie["ranks"][0], group=tie["group"])
                    if not tensor.is_contiguous() and not torch.equal(tensor, sent):
                        tensor.copy_(sent)

    def _tied_weights(self) -> Iterator[tuple[torch.nn.Parameter, Record]]:
        for tie in self.tied_comms.values():
            for weight in tied_weights(tie["module"], tie["weight_attr"]):
                yield weight, tie

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineModule:
        """Return a module with copies of the layers, for averages of weights.

        It shares process groups, plan, layout, clock, and loss function with this one. Ties hold in it.
        """
        shared = [vars(self).get(name) for name in _SHARED] + [
            *torch.distributed.distributed_c10d._world.pg_map
        ]
        copied = copy.copy(self)
        memo |= {id(self): copied} | {id(value): value for value in shared}
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        return copied

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield (name, parameter) as torch does, without the names of wrappers, see :mod:`.wrappers`."""
        return ((plain_name(name), value) for name, value in super().named_parameters(*args, **kwargs))

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters as torch does. Every step does, so their names are not made plain."""
        return (value for _, value in super().named_parameters(recurse=recurse))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, buffer) as torch does, without the names of wrappers."""
        return ((plain_name(name), value) for name, value in super().named_buffers(*args, **kwargs))

    # --- running ---

    def train(self, mode: bool = True) -> PipelineModule:
        """Set the mode of all layers, except to train mode in a training step, where DeepSpeed calls this."""
        if mode and self.keeps_modes:
            return self
        if self.training and not mode:
            self._before_eval = [module for module in self.modules() if module.training]
        return super().train(mode)

    def undo_eval(self) -> None:
        """After ``eval()`` of this module, set its parts to their modes before."""
        if not self.training:
            for module in self._before_eval:
                module.training = True

    def forward_stage(self, stage: int, inputs: Batch, steps_done: int, global_micro_batch: int) -> Batch:
        """Return the output of the layers of one stage.

        Args:
            stage: stage that this rank holds.
            inputs: tensor or tuple of tensors.
            steps_done: steps before this one.
            global_micro_batch: number over all pipes and data-parallel ranks; layers draw random numbers by both.
        """
        layers = self.stage_funcs[stage]
        first = self.parts[stage]
        interval = self.activation_checkpoint_interval
        keyed = self._keyed_layers()
        if interval == 0 or not torch.is_grad_enabled():
            return self._run(keyed, layers, first, steps_done, global_micro_batch, inputs)
        modules = self.stage_modules(stage)
        x = inputs
        for start in range(0, len(layers), interval):
            block = layers[start : start + interval]
            indices = range(first + start, first + start + len(block))
            run = functools.partial(self._run, keyed, block, indices.start, steps_done, global_micro_batch)
            if self._is_checkpointable(block):
                block_modules = [modules[index] for index in indices if index in modules]
                x = run_with_recompute(self.activation_checkpoint_func, block_modules, run, x, keyed is None)
            else:
                x = run(x)
        return x

    def _run(
        self,
        keyed: KeyedLayers | None,
        layers: list[Function],
        first: int,
        steps_done: int,
        global_micro_batch: int,
        x: Batch,
    ) -> Batch:
        """Return the output of consecutive layers; ``first`` is the index of the first one in the whole model."""
        # Recomputation calls this in the backward, when the clock is set to a different micro-batch.
        if self.clock is not None:
            self.clock.set(steps_done, global_micro_batch)
        if keyed is not None:
            return keyed.run(
                layers, x, seed=self.random_seed, step=steps_done, micro_batch=global_micro_batch, first=first
            )
        for layer in layers:
            x = layer(x)
        return x

    def _keyed_layers(self) -> KeyedLayers | None:
        """Return the runner of layers with keyed random numbers; None if they draw from the script's generators."""
        if not self._plan.job.ds_ext.keyed_random or _in_graph_capture():
            return None
        return _keyed_layers()

    def forward(self, forward_input: Batch) -> NoReturn:
        """Disabled: the engine runs one stage at a time. Raises ConfigError."""
        raise ConfigError(
            "PipelineModule: cannot be called, because a rank may hold several stages (got a direct call, or an engine "
            "of deepspeed.initialize()). Use ds_ext.initialize(), engine.train_batch() and engine.eval_batch()."
        )

    def get_additional_losses(self) -> Mapping[str, torch.Tensor | float] | None:
        """Return losses to report in addition to the loss, of the last micro-batch: name -> scalar, or None.

        The default is the attribute ``additional_losses`` of ``loss_fn``. All ranks must use the same names.
        """
        return additional_losses(self.loss_fn)

    def describe_layers(self, instruction: ds.PipeInstruction) -> str:
        """Return the layers of an instruction's stage for an error, such as " (Block 3 to Block 5)"; "" without one."""
        stage = getattr(instruction, "stage", None)
        # The loss of a head in parts has no layers.
        bounds = () if stage is None else self.parts[stage : stage + 2]
        names = self.layer_names[slice(*bounds)] if len(bounds) == 2 else []
        return f" ({' to '.join(dict.fromkeys([names[0], names[-1]]))})" if names else ""

    def stage_parameters(self, stage: int) -> list[torch.nn.Parameter]:
        """Return the trainable parameters of one stage. A shared parameter belongs to every stage that uses it."""
        parameters: dict[int, torch.nn.Parameter] = {}
        for layer in self.stage_modules(stage).values():
            parameters.update({id(p): p for p in layer.parameters() if p.requires_grad})
        return list(parameters.values())

    def stage_modules(self, stage: int) -> dict[int, torch.nn.Module]:
        """Return a dict of layer index -> module for one stage, excluding layers that are functions."""
        modules: dict[int, torch.nn.Module] = {}
        for index, layer in enumerate(self.stage_funcs[stage], start=self.parts[stage]):
            spec = self._layer_specs[index]
            # A tied layer that is compiled or has a forward_fn is a function that calls the tied module.
            module = self.tied_modules[spec.key] if isinstance(spec, TiedLayerSpec) else layer
            if isinstance(module, torch.nn.Module):
                modules[index] = module
        return modules

    # --- the parent handles one range of layers at a time ---

    def _activate(self, stage: int) -> None:
        """Make a stage of this rank the range of layers that methods of the parent handle."""
        self.forward_funcs = self.stage_funcs[stage]
        self._set_bounds(self.parts[stage], self.parts[stage + 1])

    def _call_for_stages(self, method: Callable[..., None], *args: object, **kwargs: object) -> None:
        """Call a method of the parent for each stage of this rank; afterwards, the first one is active again."""
        try:
            for stage in self.stages:
                self._activate(stage)
                method(*args, **kwargs)
        finally:
            self._activate(self.stages[0])

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile every layer of this rank with torch.compile."""
        self._call_for_stages(super().compile, *args, **kwargs)

    def save_state_dict(self, *args: object, **kwargs: object) -> None:
        """Write the layer files of this rank's stages. Arguments are the same as DeepSpeed's.

        Forward ranks write nothing, because backward ranks have the same weights.
        """
        if self.role_name != FORWARD_ROLE:
            self._call_for_stages(super().save_state_dict, *args, **kwargs)

    def load_state_dir(self, *args: object, **kwargs: object) -> None:
        """Read the layer files of this rank's stages. Arguments are the same as DeepSpeed's."""
        ties, self.tied_comms = self.tied_comms, {}  # synchronized once, after all stages
        try:
            self._call_for_stages(super().load_state_dir, *args, **kwargs)
        finally:
            self.tied_comms = ties
        self._synchronize_tied_weights()


def _facts(settings: DsExtConfig, layers: Iterable[Layer], arguments: Mapping[str, object]) -> Facts:
    """Return the facts of a module for the roll call: its settings, arguments and layers."""
    return {
        **setting_facts(settings.model_dump(exclude={"train"}), "ds_ext."),
        **file_facts({"ds_ext.schedule": settings.schedule, **settings.schedule_options}),
        **setting_facts(arguments, "PipelineModule."),
        "PipelineModule.layers": checksum(layer_description(layer).encode() for layer in layers),
    }


def _number_by_stage(module: PipelineModule) -> None:
    """Give this rank the same number in its model copy as its replicas have, for DeepSpeed's norms and file names.

    DeepSpeed numbers the ranks of a model copy by global rank, and mirrored devices run in reverse order.
    """
    coordinate, mpu = module.topology().get_coord(dist.get_rank()), module.mpu()
    mpu.ds_model_rank = coordinate.pipe * mpu.model_parallel_size + getattr(coordinate, "model", 0)


@functools.cache
def _keyed_layers() -> KeyedLayers:
    return KeyedLayers(torch.device(get_accelerator().current_device_name()))


def _in_graph_capture() -> bool:
    """Return whether a CUDA graph is being captured, in which generators cannot be seeded."""
    captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if captures:
        _log_capture()
    return captures


@functools.cache
def _log_capture() -> None:
    logger.warning("keyed_random: no effect in a CUDA graph, which replays the seeds of its capture")


def _seed(seed: int) -> None:
    torch.manual_seed(int(seed))


@contextlib.contextmanager
def _logged_prints() -> Iterator[None]:
    """Context in which printed lines are logged instead, because DeepSpeed's module prints its partition."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield
    for line in text.getvalue().splitlines():
        logger.debug(line)
