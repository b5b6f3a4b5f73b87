"""Job of a training script: flags, plan, model and stages; the plan as text, memory, facts and micro-batches."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from ...config.deepspeed_json import value_at
from ...environment import has_bf16_instructions, is_on_cpu, rank, world_size
from ...errors import ConfigError, ScheduleError
from ...launch.job_facts import checksum, setting_facts
from ...launch.roll_call import Facts
from ...model.config import TransformerConfig
from ...model.field_flags import flag_name
from ...parallel.fbd import DisaggregatedLayout
from ...parallel.hosts import Hosts
from ...parallel.partition import BALANCED, StageWork, layer_boundaries, stage_weights
from ...parallel.slices import BALANCED as BALANCED_SLICES
from ...pipe_schedules.costs import Costs
from ...planner.activation_memory import within_activation_memory
from ...planner.auto import training_sizes
from ...planner.job_plan import JobPlan, StagePlan
from ...planner.job_text import describe
from ...planner.memory import memory, model_parameters, rank_parameters
from ...planner.stage_costs import message_bytes, slice_costs, slice_tokens
from ...planner.text import HEADROOM, format_bytes, usable_bytes
from ...planner.traffic import traffic
from ...planner.training_sizes import TrainingSizes
from .arguments import FLAGS_OF_THE_JSON
from .hosts import describe_hosts
from .script_flags import RUN_FLAGS

if TYPE_CHECKING:
    from ...engine.batches import MapDataset, MicroBatches

Config = TypeVar("Config", bound=TransformerConfig)
logger = logging.getLogger(__name__)
# Flags that may differ between hosts: only rank 0 reads them, or the content of their files is compared.
_PER_HOST = RUN_FLAGS | {
    *("metrics_file", "verbose", "notes", "data_path", "hf_model", "tokenizer", "tokenizer_type"),
    *("vocab_file", "merge_file"),
}


def stage_boundaries(
    args: argparse.Namespace, plan: StagePlan, before: list[str], after: list[str], model: TransformerConfig
) -> list[int]:
    """Return ``boundaries`` of a :class:`TrainingJob` with these attributes. Raises ConfigError."""
    work = _end_work(plan, model) if args.stage_layers == BALANCED else None
    layout, schedule = plan.layout, plan.schedule.name
    ends = len(before), len(after)
    return layer_boundaries(args.num_layers, *ends, layout.placement, schedule, args.stage_layers, work)


def layers_after(plan: StagePlan, after: list[str]) -> list[str]:
    """Return the names of the layers that follow the transformer layers. No stage contains a head in parts."""
    return after[:-1] if plan.settings.vocabulary_parallel_head else after


def _end_work(plan: StagePlan, model: TransformerConfig) -> tuple[float, float]:
    """Return the work of the layers before and after the transformer layers. A lookup in the embedding counts as 0."""
    in_parts = plan.settings.vocabulary_parallel_head
    return 0.0, 0.0 if in_parts else model.head_work(model.repeated_share)


@dataclass(frozen=True)
class TrainingJob(Generic[Config]):
    """Job of a training script.

    Attributes:
        before, after: names of the layers before and after the transformer layers, on the first and the last stage.
        boundaries: stages + 1 indices of pipeline layers: stage s has the layers from element s up to element s + 1.
    """

    args: argparse.Namespace
    plan: JobPlan
    model: Config
    before: list[str]
    after: list[str]
    boundaries: list[int]

    @property
    def sizes(self) -> TrainingSizes:
        """Sizes of the model and settings of the job. A dry run with ``--hosts`` is that of a cluster with GPUs."""
        layers = [stop - start for start, stop in pairwise(self.boundaries)]
        layers[0] -= len(self.before)
        layers[-1] -= len(self.after)
        sizes = training_sizes(
            self.plan.job.deepspeed,
            self.model,
            self.plan.sizes.micro_batch_size,
            self.plan.layout.tensor_parallel_size,
            self.plan.layout.data_parallel_size,
            is_on_cpu() and self.args.hosts is None,
        )
        return replace(sizes, stage_layers=tuple(layers))

    @property
    def _shards(self) -> int:
        """Ranks over which sequence parallelism distributes tokens."""
        return self.plan.layout.tensor_parallel_size if self.plan.settings.sequence_parallel else 1

    def with_stage_work(self, divides_head: bool = True) -> Self:
        """Return the job with the work of the stages, balanced slices, and the order for "max_activation_memory".

        ``divides_head``: the model may have a head in parts.
        """
        job, plan, model, settings = self, self.plan, self.model, self.plan.settings
        ends, work = (len(self.before), len(self.after)), _end_work(plan, model)
        placement, schedule = plan.layout.placement, plan.timetable.schedule
        balanced, layers = self.boundaries, self.boundaries[-1] - sum(ends)
        if layers >= placement.stages:
            balanced = layer_boundaries(layers, *ends, placement, schedule, BALANCED, work)
        stages, even = (stage_weights(bounds, *ends, work) for bounds in (self.boundaries, balanced))
        slices = None
        if settings.sequence_slices > 1:
            tokens = slice_tokens(model, settings.sequence_slices, settings.slice_lengths, self._shards)
            slices = slice_costs(Costs(), model, tokens).slices
            if settings.slice_lengths == BALANCED_SLICES:
                job = job._with_settings(slice_lengths=[*tokens])
        # Work of a head in parts, relative to 1/D of the layers.
        head = replace(model, chunked_loss=False).head_work(model.repeated_share)
        head, parts = head * placement.devices_per_pipe / model.num_layers, None
        if divides_head and self.after[-1:] == ["head"] and layers >= placement.stages:
            body = len(self.before), len(self.after) - 1
            weights = stage_weights(layer_boundaries(layers, *body, placement, schedule), *body)
            parts = StageWork(weights, None, head=head)
        in_parts = settings.vocabulary_parallel_head
        plan = job.plan.with_work(StageWork(stages, even, slices, head if in_parts else 0.0, parts))
        if settings.max_activation_memory is None:
            return replace(job, plan=plan)
        job = replace(job, plan=within_activation_memory(plan, self.sizes))
        return job._with_settings(max_activation_memory=None)

    def _with_settings(self, **change: Any) -> Self:
        plan = self.plan
        deepspeed = {**plan.job.deepspeed, "ds_ext": {**plan.job.deepspeed["ds_ext"], **change}}
        settings = plan.settings.model_copy(update=change)
        return replace(self, plan=replace(plan, job=replace(plan.job, deepspeed=deepspeed, ds_ext=settings)))

    def facts(self) -> Facts:
        """Return facts that must be identical on all ranks."""
        from ..data.meta import fingerprint

        args, plan = self.args, self.plan
        hidden = _PER_HOST | FLAGS_OF_THE_JSON
        flags = {flag_name(name): value for name, value in vars(args).items() if name not in hidden}
        facts: Facts = {}
        if args.hf_model:
            from ...hf.folder import ModelFolder

            folder = ModelFolder(Path(args.hf_model), args.train_from_scratch)
            facts["contents of --hf-model"] = folder.fingerprint()
        return {
            **facts,
            **setting_facts({**plan.job.deepspeed, "ds_ext": plan.job.section}),
            **setting_facts(flags),
            "contents of --data-path": fingerprint(args.data_path),
            "vocabulary": str(self.model.vocab_size),
            "layout": checksum([repr(plan.layout.groups()).encode()]),
            "timetable": checksum(" ".join(map(str, order)).encode() for order in plan.timetable.orders),
        }

    def micro_batches(
        self,
        build: Callable[[tuple[int, int, int]], Sequence[MapDataset]],
        collate: Callable[[Sequence[Any]], Any] | None = None,
    ) -> tuple[MicroBatches, MicroBatches | None]:
        """Return the micro-batches for training and validation of the whole run.

        The samples for training begin with those that the checkpoint of ``--load`` has consumed, in any batch size.

        Args:
            build: returns the train, valid and test datasets for given numbers of samples; not called in a dry run
                without data.
            collate: makes a micro-batch of samples; None: they have the same shape.
        """
        from ...engine.batches import MicroBatches
        from .checkpoint_fit import position

        args, batch, size = self.args, self.plan.sizes.train_batch_size, self.plan.sizes.micro_batch_size
        step, consumed = position(args.load)
        samples = consumed + max(0, args.train_iters - step) * batch
        train, valid, _ = build((samples, args.eval_iters * batch, 0)) if args.data_path else ([], [], [])
        evaluated = MicroBatches(valid, size, collate=collate) if args.eval_iters else None
        return MicroBatches(train, size, collate=collate), evaluated

    def describe(self, hosts: Hosts | None = None, token_bytes: int = 0, weights: str = "") -> str:
        """Return the text of the plan.

        Args:
            hosts: hosts of the job; None: unknown.
            token_bytes: bytes per token that a message carries in addition to its activation.
            weights: text on the folder with the initial weights, and on their number; empty: the number is estimated.
        """
        args, plan, sizes = self.args, self.plan, self.sizes
        layer_names = [*self.before, *(f"layer {i}" for i in range(args.num_layers)), *self.after]
        message, lengths = message_bytes(sizes) + sizes.tokens * token_bytes, plan.settings.slice_lengths
        longest = message // plan.settings.sequence_slices
        if not isinstance(lengths, str):
            longest = message * max(lengths) // args.seq_length
        verbose = args.verbose or plan.settings.print_plan == "all"
        settings = [f"rate      {_rate(plan.job.deepspeed)}", *args.notes, *self._machine_notes(sizes)]
        text = describe(
            plan,
            boundaries=self.boundaries,
            layer_names=layer_names,
            message_bytes=longest,
            model=weights or f"{round(model_parameters(sizes)):,} parameters (estimated)",
            parameters=[*map(round, rank_parameters(sizes, plan.layout.placement))],
            memory=memory(plan.timetable, sizes, lengths),
            defers=args.transformer_impl != "transformer_engine",
            hosts=None if hosts is None else list(map(hosts.host, range(hosts.world_size))),
            settings=settings,
            verbose=verbose,
            gpus=args.dry_run or _has_gpus(),
        )
        lines = []
        has_places = not isinstance(plan.layout, DisaggregatedLayout) or plan.layout.order is not None
        if has_places or plan.settings.fbd.forward_hosts is None:
            volumes = traffic(sizes, plan.layout.placement, plan.sizes.micro_batches)
            volumes = replace(volumes, message=message)
            lines = describe_hosts(plan.layout, hosts, volumes, plan.sizes.micro_batches, verbose)
        if lines and args.dry_run and args.hosts is None:
            lines.append("note: --hosts: every host is assumed to have as many ranks as the first")
        return "\n".join([text, *lines])

    def _machine_notes(self, sizes: TrainingSizes) -> list[str]:
        """Return notes on the number of ranks, and on CPUs on memory of attention and the speed of bf16."""
        args, notes = self.args, []
        if args.dry_run and args.hosts is None and world_size() == 1:
            notes.append("note: without --hosts a dry run plans the fewest ranks: one pipeline group")
        if sizes.attention_scores:
            notes.append(
                "note: attention with dropout stores its scores on CPUs, not on GPUs (--dry-run --hosts)"
            )
        is_on_gpus = args.dry_run or _has_gpus()
        if not is_on_gpus and sizes.precision == "bf16" and not has_bf16_instructions():
            notes.append(
                'note: this CPU has no bf16 instructions: steps are faster without the section "bf16"'
            )
        return notes

    def check_memory(self) -> None:
        """Raise ConfigError if this rank's tensors need more memory than is free.

        A rank whose tensors take more than the share that plans use logs a warning.
        """
        from ...engine.deepspeed_api.device import free_bytes

        free, plan = free_bytes(), self.plan
        if free is None:
            return
        device, _, _ = plan.layout.coordinates(rank())
        needed = memory(plan.timetable, self.sizes, plan.settings.slice_lengths)[device].total
        need = f"{format_bytes(needed)} for tensors (free: {format_bytes(free)})"
        text = f"memory: rank {rank()} needs an estimated {need}."
        usable = usable_bytes(free, HEADROOM, "headroom")
        if needed > free:
            slices = self._fitting_slices(device, usable)
            fix = f"--sequence-slices {slices}, " if slices and self.args.transformer_impl == "local" else ""
            raise ConfigError(
                f"{text} Use {fix}smaller micro-batches, --recompute-granularity full or more devices; "
                f"`python -m ds_ext plan --memory {format_bytes(free).replace(' ', '')}` lists what fits."
            )
        if needed > usable:
            logger.warning("%s Allocators and communicators may need more than the rest.", text)

    def _fitting_slices(self, device: int, free: int) -> int | None:
        plan, sizes = self.plan, self.sizes
        for slices in (2, 4, 8, 16, 32, 64) if plan.schedule.has_slices else ():
            if slices <= plan.timetable.slices or sizes.seq_length % (slices * self._shards):
                continue
            with contextlib.suppress(ScheduleError):
                devices, count = plan.settings.pipeline_parallel_size, plan.sizes.micro_batches
                timetable = plan.schedule.timetable(devices, count, plan.options, slices=slices)
                if memory(timetable, sizes)[device].total <= free:
                    return slices
        return None


def _has_gpus() -> bool:
    import torch

    return torch.cuda.is_available()


def _rate(config: Mapping[str, Any]) -> str:
    params = value_at(config, "scheduler.params") or {}
    text = f"{value_at(config, 'optimizer.params.lr') or 'the default of the optimizer'}, "
    if value_at(config, "scheduler.type") != "MegatronLR":
        return text + (value_at(config, "scheduler.type") or "constant")
    style = params.get("decay_style", "linear")
    text += style if style == "constant" else f"{style} to {params.get('min_lr', 0)}"
    steps, warmup = params.get("total_num_steps", 0), params.get("warmup_num_steps", 0)
    return f"{text} in {steps:,.10g} steps, warm-up {warmup:,.10g}"
