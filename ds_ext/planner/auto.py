"""Choice of the schedule for a job whose JSON has ``"schedule": "auto"``.

The JSON fixes ``train_batch_size`` and the micro-batch size. Therefore N, the number of micro-batches of a pipeline
group, is the same for every schedule and number of replicas, and all candidates train on the same samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.deepspeed_json import (
    adam_implementation,
    fp32_sums_of_bf16,
    precision,
    reduce_bucket_size,
    zero_stage,
)
from ..config.job import AUTO, JobConfig
from ..errors import ConfigError, ScheduleError
from ..model.config import PLANNED, SIZES, TransformerConfig
from ..model.data_layout import DATA_NAME, META_NAME
from ..model.field_flags import fields_of
from ..parallel.layout import data_parallel_size
from ..parallel.partition import BALANCED
from ..pipe_schedules import Placement, Schedule, get_schedule
from ..pipe_schedules.costs import Costs, read_costs
from ..pipe_schedules.definition import Option, Orders
from ..pipe_schedules.placement import linear
from .candidates import Candidates
from .request import Request
from .search import choose
from .text import HEADROOM, join_words, parse_bytes, usable_bytes
from .training_sizes import RECOMPUTATIONS, SCORES_ON_CPU, TrainingSizes

_GPT2_VOCABULARY = 50257
_OPTIONS = {
    "costs": Option("f=1,b=1,w=1,comm=0", None, "costs to choose for, in the format of --costs"),
    "memory": Option("", None, 'memory of a device, such as "16GB"; "": no limit'),
    "headroom": Option(HEADROOM, None, "share of the memory for what is not counted"),
    "vocab_size": Option(0, 0, "vocabulary size; 0: that of the data, or else GPT-2's"),
}


def choose_for_job(
    job: JobConfig,
    world_size: int | None = None,
    layers: int | None = None,
    model: TransformerConfig | None = None,
) -> Candidates:
    """Rank the schedules for a job with ``"schedule": "auto"``.

    With ``"recompute_granularity": "auto"`` in "train", the planner chooses it.

    Args:
        world_size: number of processes; None: one pipeline group.
        layers: number of the model's pipeline layers; None: unknown.
        model: the model; None: that of "train".
    """
    settings = job.ds_ext
    devices, tensor_parallel = settings.pipeline_parallel_size, settings.tensor_parallel_size
    lengths = settings.slice_lengths
    data = 1 if world_size is None else data_parallel_size(world_size, linear(devices), tensor_parallel)
    try:
        request = replace(
            _make_request(job, data, layers, model),
            slices=settings.sequence_slices,
            lengths=lengths if isinstance(lengths, str) else tuple(lengths),
            head_parts=settings.vocabulary_parallel_head,
        )
        _require_layers(request)
        candidates = choose(request)
    except ScheduleError as error:
        raise ConfigError(f'schedule "auto": {error}') from None
    if candidates.best is None:
        fix = "" if candidates.smallest is None else f" Use {_remedies(request)}."
        raise ConfigError(f'schedule "auto": {candidates.reason()}{fix}')
    return candidates


def _make_request(job: JobConfig, data: int, layers: int | None, model: TransformerConfig | None) -> Request:
    """Return the request for whole sequences and a whole head, with ``data`` pipeline groups."""
    config, options, train = job.deepspeed, job.ds_ext.schedule_options, job.ds_ext.train
    micro_batch, micro_batches = _micro_batches(config, data)
    values = _AUTO.resolve_options(options)
    if model is None:
        entries, _ = vocabulary(values["vocab_size"], train)
        model = model_of_train(train, entries)
    else:
        model = replace(model, vocab_size=values["vocab_size"] or model.vocab_size)
    sizes = model and training_sizes(config, model, micro_batch, job.ds_ext.tensor_parallel_size, data)
    size = parse_bytes(values["memory"], "schedule_options.memory") if values["memory"] else None
    limit = None if size is None else usable_bytes(size, values["headroom"], "schedule_options.headroom")
    if limit is not None and sizes is None:
        raise ConfigError(
            f'schedule_options.memory: "auto" needs the sizes of the model (got {values["memory"]!r}). Add '
            f'{", ".join(SIZES)} to "train", or remove "memory".'
        )
    return Request(
        job.ds_ext.pipeline_parallel_size,
        micro_batches,
        read_costs(values["costs"]),
        sizes,
        limit,
        recompute=_recomputations(sizes, train),
        stage_layers=train.get("stage_layers"),
        max_stages=layers,
        intervals=(1 if sizes is None else sizes.recompute_interval,),
    )


def _recomputations(sizes: TrainingSizes | None, train: Mapping[str, Any]) -> tuple[str, ...]:
    if train.get("recompute_granularity") == AUTO and train.get("recompute_interval", 1) == 1:
        return RECOMPUTATIONS
    return ("none",) if sizes is None else (sizes.recompute,)


def best_schedule(candidates: Candidates, divides_head: bool = False) -> Schedule:
    """Return the best candidate as a schedule that accepts the options of "auto"."""
    best = candidates.best
    assert best is not None, "choose_for_job() raises without a best candidate"
    schedule = get_schedule(best.schedule)

    def place(num_devices: int) -> Placement:
        return schedule.placement(num_devices, best.options)

    def program(placement: Placement, micro_batches: int, costs: Costs, slices: int, **_: object) -> Orders:
        return (
            schedule.dividing_head(divides_head)
            .timetable(placement.num_devices, micro_batches, best.options, best.costs, slices)
            .orders
        )

    return Schedule(schedule.name, program, place, options=_OPTIONS, planned=True, divides_head=divides_head)


def vocabulary(vocab_size: int, train: Mapping[str, Any]) -> tuple[int, str]:
    """Return the vocabulary size that "auto" assumes, and its source.

    Args:
        vocab_size: option "vocab_size"; 0 if it is not set.
        train: "train" of the section. Without a "vocab_size", a ``meta.json`` beside its "data_path" contains the size.
            All parts of a blend have the same tokenizer, so the first one decides.
    """
    if vocab_size:
        return vocab_size, '"vocab_size"'
    if train.get("vocab_size"):
        return train["vocab_size"], "the model"
    for folder in _data_folders(train.get("data_path") or []):
        try:
            size = json.loads((folder / META_NAME).read_text(encoding="utf-8"))["vocab_size"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the data is checked when it is opened
        if isinstance(size, int) and size > 0:
            return size, str(folder / META_NAME)
    return _GPT2_VOCABULARY, "default: GPT-2's"


def _data_folders(data_path: str | Sequence[Any]) -> Iterator[Path]:
    """Yield the folders that "data_path" may mean: every element, and every word of it, as in a blend."""
    for text in [data_path] if isinstance(data_path, str) else data_path:
        for word in (text, *str(text).split()):
            path = Path(str(word))
            # A folder that `prepare` wrote, or the prefix of the files in it.
            yield path.parent if path.with_suffix("").name == DATA_NAME else path


def _require_layers(request: Request) -> None:
    """Raise ScheduleError for fewer layers than devices, because every schedule has a stage on every device."""
    sizes, devices = request.sizes, request.devices
    if sizes is None or request.stage_layers not in (None, BALANCED):
        return
    if sizes.num_layers < devices:
        raise ScheduleError(
            f"num_layers: fewer than pipeline_parallel_size {devices} (got {sizes.num_layers}). Use at least {devices} "
            f"layers, or a pipeline_parallel_size of at most {sizes.num_layers}."
        )


def _remedies(request: Request) -> str:
    sizes = request.sizes
    assert sizes is not None, "a memory limit needs a model"
    remedies = ["more devices (pipeline_parallel_size, tensor_parallel_size)"]
    if sizes.micro_batch > 1:
        remedies.append("a smaller micro-batch")
    if not sizes.bytes.sharded:
        remedies.append("ZeRO stage 1")
    if "full" not in request.recompute:
        remedies.append("recompute_granularity full")
    if sizes.precision == "fp32":
        remedies.append("bf16")
    return join_words(remedies)


def _micro_batches(config: Mapping[str, Any], data: int) -> tuple[int, int]:
    """Return the micro-batch size and N."""
    train, micro_batch = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    steps = config.get("gradient_accumulation_steps")
    if train is None or micro_batch is None or steps is not None:
        raise ConfigError(
            'schedule: "auto" needs a batch that does not depend on the schedule (got train_batch_size '
            f"{train}, train_micro_batch_size_per_gpu {micro_batch}, gradient_accumulation_steps {steps}). Set "
            f"the first two and remove gradient_accumulation_steps."
        )
    for key, value in (("train_batch_size", train), ("train_micro_batch_size_per_gpu", micro_batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{key}: must be a positive integer (got {value!r}).")
    unit = micro_batch * data
    if train % unit:
        near = join_words(n for n in (train // unit * unit, (train // unit + 1) * unit) if n)
        raise ConfigError(
            f"train_batch_size: must be a multiple of {unit}, micro-batch size {micro_batch} x {data} pipeline groups "
            f"(got {train}). Use {near}."
        )
    return micro_batch, train // unit


def model_of_train(train: Mapping[str, Any], vocab_size: int) -> TransformerConfig | None:
    """Return the model that "train" describes; None if a size is missing."""
    if not all(isinstance(train.get(key), int) for key in SIZES):
        return None
    names = [*PLANNED]
    if train.get("recompute_granularity") in RECOMPUTATIONS:  # not "auto"
        names += ["recompute", "recompute_interval"]
    return TransformerConfig(**{**fields_of(TransformerConfig, train, names), "vocab_size": vocab_size})


def training_sizes(
    config: Mapping[str, Any],
    model: TransformerConfig,
    micro_batch: int,
    tensor_parallel: int,
    data: int,
    on_cpu: bool = False,
) -> TrainingSizes:
    """Return the sizes of a model that a job trains.

    Args:
        config: the whole DeepSpeed JSON.
        micro_batch: samples of a micro-batch.
        data: number of pipeline groups.
        on_cpu: attention with dropout stores its scores.
    """
    reduced = fp32_sums_of_bf16(config).get("communication_data_type") or precision(config)
    section = config.get("ds_ext", {})
    return TrainingSizes.of_model(
        model,
        sequence_parallel=bool(section.get("sequence_parallel")),
        overlap_across_steps=bool(section.get("overlap_across_steps")),
        micro_batch=micro_batch,
        precision=precision(config),
        optimizer=adam_implementation(config),
        reduced_bytes=4 if str(reduced).lower() == "fp32" else 2,
        bucket=reduce_bucket_size(config),
        tensor_parallel=tensor_parallel,
        data_parallel=data,
        zero_stage=min(zero_stage(config), 1),
        **(SCORES_ON_CPU if on_cpu and model.attention_dropout else {}),
    )


def _refuse(num_devices: int) -> Placement:
    """Refuse the placeholder of "auto", which has no placement and no order."""
    raise ScheduleError('schedule: "auto" needs the sizes of a job. Use it in a JSON only.')


_AUTO = Schedule(AUTO, _refuse, _refuse, options=_OPTIONS)  # checks the options before a schedule is chosen
