"""``bench training``: tokens per second of a GPT with real arithmetic, in our engine and in DeepSpeed's.

The engines take turns step by step; compare the ratio of the medians. With more ranks than cores the ranks compute one
after the other, and the figures hardly depend on the engines. On GPUs the model computes in bf16, and the table also
has the MFU and the peak memory beside that of ``simulate``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ds_ext.comm.spin import usable_cores
from ds_ext.errors import ConfigError
from ds_ext.gpus import peak_tflops
from ds_ext.model.config import TransformerConfig
from ds_ext.pipe_schedules import Timetable, get_schedule
from ds_ext.planner.memory import memory
from ds_ext.planner.text import format_bytes
from ds_ext.planner.training_sizes import TrainingSizes

from .command import (
    Report,
    add_device_flag,
    add_number,
    add_size_flags,
    check_at_least,
    count_gpus,
    json_item,
    names_in,
    table,
)
from .ranks import Job, Run, take_turns

SUMMARY = "tokens per second of a small GPT, in our engine and in DeepSpeed's"
RIVAL = "deepspeed_1f1b"
TORCH_RIVALS = ("torch_1f1b", "torch_interleaved_1f1b", "torch_zbv", "torch_dualpipev")
VOCAB = 2048
_WARM_UP = 2  # steps
_LIMIT_S = 120.0
_LEARNING_RATE = 1e-4
# Largest relative difference between losses of the same step. In bf16, torch also sums gradients in bf16.
_LOSS_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}


@dataclass(frozen=True)
class TrainingJob(Job):
    """Sizes of the GPT; ``samples`` are those of a micro-batch."""

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    samples: int = 4
    seq: int = 128

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batches * self.samples * self.seq


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmark."""
    add_size_flags(parser, num_devices=2, micro_batches=8)
    parser.add_argument("--schedules", default="1f1b", metavar="A,B", help="%(default)s")
    rivals = f"any of {', '.join((RIVAL, *TORCH_RIVALS))}, or none (%(default)s)"
    parser.add_argument("--rivals", default=RIVAL, metavar="A,B", help=rivals)
    add_number(parser, "--steps", 10, "K", f"steps of each engine, after {_WARM_UP} warm-up steps")
    add_device_flag(parser)
    add_number(parser, "--num-layers", TrainingJob.layers, "L", "transformer layers")
    add_number(parser, "--hidden-size", TrainingJob.hidden, "H", "hidden size, a multiple of 64")
    add_number(parser, "--seq-length", TrainingJob.seq, "S", "tokens of a sample")
    add_number(parser, "--micro-batch-size", TrainingJob.samples, "B", "samples of a micro-batch")
    peak = "peak of a GPU for the MFU (default: from its name; no MFU without one)"
    parser.add_argument("--peak-tflops", type=float, metavar="T", help=peak)


def measure(args: argparse.Namespace) -> Report:
    """Measure our schedules and DeepSpeed's engine.

    Raises:
        ConfigError: a flag is wrong.
        RankFailure: one of our engines failed, or DeepSpeed's on the CPU.
    """
    ours, rivals, job = names_in(args.schedules), _rivals(args.rivals), _job(args)
    if not ours + rivals:
        raise ConfigError("--schedules, --rivals: nothing to measure (got none and none). Name at least one.")
    for name in ours:
        get_schedule(name).timetable(args.num_devices, args.micro_batches)
    processors = min(count_gpus(job.device), job.num_ranks) or 1  # a CPU host counts as one
    peak = args.peak_tflops if job.device == "cpu" else args.peak_tflops or _peak_of_gpu()
    # Ranks that share a GPU use gloo, which cannot send the tensors of DeepSpeed's engine.
    tolerant = job.device == "cuda" or any(name in TORCH_RIVALS for name in rivals)
    runs = take_turns([*ours, *rivals], job, _WARM_UP + args.steps, keep_going=tolerant)
    _compare_losses(runs, _LOSS_TOLERANCE[job.device])
    speeds = {name: _tokens_per_s(run, job) for name, run in runs.items()}
    flops = _model(job).flops_per_sample / job.seq  # per token
    of_rival = statistics.median(speeds[RIVAL]) if speeds.get(RIVAL) else None
    items: list[dict[str, Any]] = []
    errors: list[str] = []
    rows: list[tuple[str, ...]] = [(*_HEAD, f"ratio to {RIVAL}")]
    for name, run in runs.items():
        params: dict[str, Any] = {
            "stages": job.num_ranks,
            "micro_batches": job.micro_batches,
            "device": job.device,
        }
        if run.error is not None:
            errors.append(f"{name} failed: {run.error}")
            items.append(json_item(name, params | {"error": run.error}, [], "tokens/s"))
            rows.append((name, "failed", *[""] * 6))
            continue
        median = statistics.median(speeds[name])
        params["ratio"] = None if of_rival is None else median / of_rival
        params["model_flops_per_s"] = median * flops
        params["mfu"] = None if peak is None else median * flops / (peak * 1e12 * processors)
        params["losses"] = _losses(run)
        params["max_memory_bytes"] = max((answer[2] or 0 for answer in run.rounds[-1]), default=0) or None
        params["simulated_memory_bytes"] = (
            None if run.timetable is None else _simulated_bytes(run.timetable, job)
        )
        items.append(json_item(name, params, speeds[name], "tokens/s", best=max))
        rows.append((name, f"{median:.0f}", f"{max(speeds[name]):.0f}", *_cells(params)))
    text = "\n".join([table(rows), *errors])
    if job.device == "cpu" and args.num_devices > usable_cores():
        text += (
            f"\n{args.num_devices} ranks on {usable_cores():g} cores: figures hardly depend on the engines."
        )
    title = f"{args.num_devices} devices, {args.micro_batches} micro-batches"
    return Report(items, title, text, any(runs[name].error for name in ours))


_HEAD = ("engine", "tokens/s", "best", "TFLOP/s", "MFU", "memory", "simulated")


def _cells(params: dict[str, Any]) -> tuple[str, ...]:
    mfu, measured, simulated, ratio = (
        params[key] for key in ("mfu", "max_memory_bytes", "simulated_memory_bytes", "ratio")
    )
    return (
        f"{params['model_flops_per_s'] / 1e12:.3g}",
        "" if mfu is None else f"{mfu:.1%}",
        "" if measured is None else format_bytes(measured),
        "" if simulated is None else format_bytes(simulated),
        "" if ratio is None else f"{ratio:.3f}",
    )


def _job(args: argparse.Namespace) -> TrainingJob:
    for flag in ("steps", "num_layers", "hidden_size", "seq_length", "micro_batch_size"):
        check_at_least("--" + flag.replace("_", "-"), getattr(args, flag), 1)
    if args.hidden_size % 64:
        raise ConfigError(f"--hidden-size: must be a multiple of 64 (got {args.hidden_size}).")
    if args.peak_tflops is not None and not args.peak_tflops > 0:
        raise ConfigError(f"--peak-tflops: must be greater than 0 (got {args.peak_tflops:g}).")
    sizes = {"layers": args.num_layers, "hidden": args.hidden_size, "heads": args.hidden_size // 64}
    sizes |= {"samples": args.micro_batch_size, "seq": args.seq_length}
    return TrainingJob(build, args.num_devices, _LIMIT_S, args.micro_batches, device=args.device, **sizes)


def _peak_of_gpu() -> float | None:
    """Return the peak of a GPU in TFLOP/s, from its name; None for an unknown one."""
    import torch

    return peak_tflops(torch.cuda.get_device_name(0))


def _rivals(text: str) -> list[str]:
    names = names_in(text)
    for name in names:
        if name != RIVAL and name not in TORCH_RIVALS:
            known = ", ".join((RIVAL, *TORCH_RIVALS))
            raise ConfigError(f"--rivals: unknown name (got {name!r}). Use {known}, or none.")
    return names


def _losses(run: Run) -> list[float]:
    """Return the loss of every step, warm-up included."""
    return [next(loss for *_, loss in answers if loss is not None) for answers in run.rounds]


def _compare_losses(runs: Mapping[str, Run], tolerance: float) -> None:
    """Mark engines as failed whose losses differ from those of the first engine that did not fail."""
    first: list[float] | None = None
    for run in runs.values():
        if run.error is not None:
            continue
        losses = _losses(run)
        first = first or losses
        for step, (loss, expected) in enumerate(zip(losses, first, strict=True)):
            if not abs(loss - expected) <= tolerance * abs(expected):
                run.error = f"step {step}: loss {loss:.6g}, expected {expected:.6g}"
                break


def _tokens_per_s(run: Run, job: TrainingJob) -> list[float]:
    times = (zip(*answers, strict=True) for answers in run.rounds[_WARM_UP:]) if run.error is None else ()
    return [job.tokens / (max(ends) - min(starts)) for starts, ends, *_ in times]


def _model(job: TrainingJob) -> TransformerConfig:
    sizes = job.layers, job.hidden, job.heads, job.seq, VOCAB
    return TransformerConfig(*sizes, hidden_dropout=0.0, attention_dropout=0.0)


def _simulated_bytes(timetable: Timetable, job: TrainingJob) -> int:
    """Return the memory of the device that needs the most, as ``simulate`` estimates it."""
    on_gpu = job.device == "cuda"
    sizes = TrainingSizes.of_model(
        _model(job),
        stage_layers=_split(job.layers, timetable.placement.stages),
        micro_batch=job.samples,
        precision="bf16" if on_gpu else "fp32",
        optimizer="foreach" if on_gpu else "for-loop",  # torch's default
    )
    return max(device.total for device in memory(timetable, sizes))


def _split(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


@dataclass(frozen=True)
class TrainingEngine:
    """Engine of this rank; ``step()`` trains one step."""

    step: Callable[[], float | None]
    timetable: Timetable
    device: str

    def run(self) -> tuple[float, float, int | None, float | None]:
        """Return (start, end, peak bytes of the GPU so far, loss) of one step.

        The step ends when all ranks have finished it. The loss is None on a rank that does not have it.
        """
        import torch
        import torch.distributed as dist

        start = time.perf_counter()
        loss = self.step()
        used = None
        if self.device == "cuda":
            torch.cuda.synchronize()
            used = torch.cuda.max_memory_allocated()
        dist.barrier()
        return start, time.perf_counter(), used, loss


def build(name: str, job: TrainingJob) -> TrainingEngine:
    """Build the engine called ``name``: a rival, or ours with the schedule of that name."""
    import torch

    from ds_ext.recipes.models.gpt import GPTConfig, gpt_layer_specs, gpt_loss
    from ds_ext.tensor_parallel import DropoutClock, TensorParallel

    from .rivals import Workload

    # By default a small model, so that the engine's share of a step shows: 0.8 million parameters per layer.
    config = GPTConfig(**vars(_model(job)))
    shape = (job.micro_batches, job.samples, job.seq + 1)
    ids = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    clock, tp = DropoutClock(), TensorParallel()
    workload = Workload(
        gpt_layer_specs(config, tp, clock),
        [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in ids],
        loss_fn=_mean_of(gpt_loss(config, tp)),
        partition_method="type:TransformerLayer",
        optimizer={"type": "AdamW", "params": {"lr": _LEARNING_RATE, "torch_adam": True}},
        precision={"bf16": {"enabled": True}} if job.device == "cuda" else {},
    )
    if name in TORCH_RIVALS:
        engine = _in_torch(name, workload, job)
        return TrainingEngine(engine.step, engine.timetable, job.device)
    schedule = get_schedule("1f1b" if name == RIVAL else name)
    timetable = schedule.timetable(job.num_ranks, job.micro_batches)
    if name == RIVAL:
        _, step = workload.in_deepspeeds(job.num_ranks)
    else:
        _, step = workload.in_ours(job, timetable, clock)
    return TrainingEngine(step, timetable, job.device)


def _mean_of(loss_fn: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any, Any], Any]:
    """Return a loss function for every engine: the mean over the labels, which all count."""

    def mean(outputs: Any, labels: Any) -> Any:
        total, count = loss_fn(outputs, labels)
        return total / count

    return mean


def _in_torch(name: str, workload: Any, job: TrainingJob) -> Any:
    """Build the GPT under a schedule of torch. Embeddings are in the first stage, norm and head in the last."""
    import torch
    import torch.distributed as dist

    from .torch_rivals import TORCH_SCHEDULES, TorchEngine, build_stages

    schedule = TORCH_SCHEDULES[name]
    placement = schedule.placement(job.num_ranks)
    sizes = list(_split(job.layers, placement.stages))
    others = len(workload.layers) - job.layers
    sizes[0] += 2
    sizes[-1] += others - 2
    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    modules, tied = build_stages(
        workload.layers, [0, *accumulate(sizes)], placement.stages_of(dist.get_rank()), dtype
    )
    device = job.torch_device()
    return TorchEngine(
        schedule,
        {stage: module.to(device) for stage, module in modules.items()},
        workload.batches,
        workload.loss_fn,
        lambda parameters: torch.optim.AdamW(parameters, lr=_LEARNING_RATE),
        device,
        tied,
    )
