"""``"schedule": "auto"`` in a JSON: the job's own sizes decide.

With "auto" the batch is fixed by ``train_batch_size`` and the micro-batch size. So N, the micro-batches of a pipeline
group, is the same for every schedule, whatever its number of replicas, and all candidates train the same samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.deepspeed_json import precision, zero_stage
from ..config.job import AUTO
from ..data.layout import DATA_NAME, META_NAME
from ..errors import ConfigError, ScheduleError
from ..parallel.layout import data_parallel_size
from ..parallel.partition import BALANCED
from ..pipe_schedules import Placement, Schedule, get_schedule
from ..pipe_schedules.costs import Costs, read_costs
from ..pipe_schedules.placement import linear
from ..pipe_schedules.registry import Option, Orders
from .candidates import Choice, parse_bytes
from .memory import ModelSizes
from .search import RECOMPUTE, Request, choose

_GPT2_VOCABULARY, _UNKNOWN = 50257, 0
_OPTIONS = {
    "costs": Option("f=1,b=1,w=1,comm=0", None, "what to choose for, as --costs"),
    "memory": Option("", None, 'of a device, such as "16GB"; "": no limit'),
    "vocab_size": Option(_UNKNOWN, 0, "entries of the tokenizer; 0: those of the data's, or GPT-2's"),
}
MODEL_SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "seq_length": "seq",
}


def choose_for_job(
    config: Mapping[str, Any],
    *,
    devices: int,
    tensor_parallel: int,
    options: Mapping[str, Any],
    train: Mapping[str, Any],
    world_size: int | None = None,
) -> Choice:
    """The schedule of a job whose JSON says "auto".

    Args:
        config: the whole DeepSpeed JSON.
        devices, tensor_parallel: D and TP of its "ds_ext" section; ``options`` and ``train`` are the section's too. A
            ``recompute_granularity`` of "auto" is chosen as well.
        world_size: number of processes; None: one pipeline group.

    Raises:
        ConfigError: the batch is not fixed, the sizes do not fit each other, or no schedule fits the memory.
    """
    data = _data_parallel(devices, tensor_parallel, world_size)
    micro, micro_batches = _micro_batches(config, data)
    try:
        values = _SHELL.resolve_options(options)
        entries, _ = vocabulary(values["vocab_size"], train)
        sizes = _model(config, train, entries, micro, tensor_parallel, data)
        limit = parse_bytes(values["memory"]) if values["memory"] else None
        if limit is not None and sizes is None:
            raise ConfigError(
                f'"schedule": "auto" with "memory" needs the model\'s sizes: give {", ".join(MODEL_SIZES)} in '
                f'"ds_ext": {{"train": ...}}, or leave "memory" out.'
            )
        kinds = (sizes.recompute,) if sizes is not None else ("none",)
        if train.get("recompute_granularity") == AUTO and train.get("recompute_interval", 1) == 1:
            kinds = RECOMPUTE
        costs = read_costs(values["costs"])
        layers = train.get("stage_layers")
        request = Request(devices, micro_batches, costs, sizes, limit, recompute=kinds, stage_layers=layers)
        _require_layers(request)
        choice = choose(request)
    except ScheduleError as error:
        raise ConfigError(f'"schedule": "auto": {error}') from None
    if choice.best is None:
        way = "" if choice.nearest is None else f" Use {_ways(request)}."
        raise ConfigError(f'"schedule": "auto": {choice.reason()}{way}')
    return choice


def vocabulary(given: int, train: Mapping[str, Any]) -> tuple[int, str]:
    """Entries of the tokenizer that "auto" counts with, and who says so.

    Args:
        given: the option "vocab_size"; 0 if it is not given.
        train: whose "data_path" may have a ``meta.json`` beside it. Of a blend the first one counts: all its parts
            have one tokenizer.
    """
    if given:
        return given, '"vocab_size"'
    words = train.get("data_path") or []
    words = [words] if isinstance(words, str) else words
    for word in [word for text in words for word in (text, *str(text).split())]:
        path = Path(str(word))
        # A folder of `prepare`, or the prefix in it.
        folder = path.parent if path.with_suffix("").name == DATA_NAME else path
        try:
            found = json.loads((folder / META_NAME).read_text(encoding="utf-8"))["vocab_size"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # what is wrong with the data is said when they are read
        if isinstance(found, int) and found > 0:
            return found, str(folder / META_NAME)
    return _GPT2_VOCABULARY, "GPT-2, as nothing says another one"


def _require_layers(request: Request) -> None:
    """Every schedule has a stage on every device. Raises ScheduleError."""
    sizes, devices = request.sizes, request.devices
    if sizes is None or not isinstance(sizes.layers, int) or request.stage_layers not in (None, BALANCED):
        return
    if sizes.layers < devices:
        raise ScheduleError(
            f"num_layers {sizes.layers} is less than pipeline_parallel_size {devices}, and every device needs a layer. "
            f"Use at least {devices} layers, or a pipeline_parallel_size of at most {sizes.layers}."
        )


def _ways(request: Request) -> str:
    """What would make a model fit that does not, of what was not tried."""
    sizes = request.sizes
    assert sizes is not None, "only bytes are too many"
    ways = ["more devices (pipeline_parallel_size, tensor_parallel_size)"]
    if sizes.micro_batch > (2 if sizes.weight_bytes > 2 else 1):  # see _model
        ways.append("a smaller micro-batch")
    if sizes.zero_stage == 0:
        ways.append("ZeRO stage 1, which shards the optimizer over replicas and data-parallel ranks")
    if "full" not in request.recompute:
        ways.append("recompute_granularity full")
    if sizes.weight_bytes > 2:
        ways.append("bf16")
    return f"{', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else ways[0]


def chosen_schedule(choice: Choice) -> Schedule:
    """The best of a choice as a schedule that takes the options of "auto", whatever its own are."""
    best = choice.best
    assert best is not None, "choose_for_job refuses a choice without a best"
    found = get_schedule(best.schedule)

    def place(ranks: int) -> Placement:
        return found.placement(ranks, best.options)

    def program(placement: Placement, micro_batches: int, costs: Costs, **_: object) -> Orders:
        return found.timetable(placement.num_devices, micro_batches, best.options, best.costs).orders

    return Schedule(found.name, program, place, options=_OPTIONS, planned=True)


def _data_parallel(devices: int, tensor_parallel: int, world_size: int | None) -> int:
    # Every placement has D devices, so any will do.
    return 1 if world_size is None else data_parallel_size(world_size, linear(devices), tensor_parallel)


def _micro_batches(config: Mapping[str, Any], data: int) -> tuple[int, int]:
    """The micro-batch size, and N."""
    train, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if train is None or micro is None or config.get("gradient_accumulation_steps") is not None:
        raise ConfigError(
            '"schedule": "auto" needs the batch of all pipeline groups, so that every schedule trains the same: '
            'give "train_batch_size" and "train_micro_batch_size_per_gpu", and leave '
            '"gradient_accumulation_steps" out.'
        )
    for key, value in (("train_batch_size", train), ("train_micro_batch_size_per_gpu", micro)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f'"{key}" must be a positive integer; got {value!r}.')
    part = micro * data
    if train % part:
        ways = " or ".join(str(n) for n in (train // part * part, (train // part + 1) * part) if n)
        groups = f"{data} pipeline group{'s' if data > 1 else ''}"
        raise ConfigError(
            f"train_batch_size {train} does not divide into micro-batches of {micro} for {groups}. Use {ways}."
        )
    return micro, train // part


def _model(
    config: Mapping[str, Any],
    train: Mapping[str, Any],
    vocabulary: int,
    micro_batch: int,
    tensor_parallel: int,
    data: int,
) -> ModelSizes | None:
    """The sizes that "train" says; None unless it says all. Raises ScheduleError."""
    if not all(isinstance(train.get(key), int) for key in MODEL_SIZES):
        return None
    half = precision(config) != "fp32"
    # Of layers some of which recompute: as if none did, which is the safe side.
    recompute = train.get("recompute_granularity") if train.get("recompute_interval", 1) == 1 else None
    return ModelSizes(
        **{name: train[key] for key, name in MODEL_SIZES.items()},
        vocab=vocabulary,
        # Activations are counted in 16 bits: twice the samples are as many bytes as 32 bits.
        micro_batch=micro_batch if half else 2 * micro_batch,
        weight_bytes=2 if half else 4,
        gradient_bytes=2 if half else 4,
        master_bytes=4 if half else 0,
        tensor_parallel=tensor_parallel,
        data_parallel=data,
        zero_stage=min(zero_stage(config), 1),
        sequence_parallel=bool(config.get("ds_ext", {}).get("sequence_parallel")),
        recompute=recompute if recompute in RECOMPUTE else "none",
    )


def _never(ranks: int) -> Placement:
    raise ScheduleError('"auto" is a schedule only for a job, which has sizes to choose for.')


# Only to check its options, before there is a choice.
_SHELL = Schedule(AUTO, _never, _never, options=_OPTIONS)
