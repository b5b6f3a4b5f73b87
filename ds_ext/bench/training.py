"""``bench training``: tokens per second of a small GPT with real arithmetic, in our engine and in DeepSpeed's.

The engines take turns step by step; compare the ratio of the medians. With more ranks than cores the ranks compute one
after the other, and the figures hardly depend on the engines.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..comm.spin import usable_cores
from ..pipe_schedules import Timetable, get_schedule
from .command import Report, add_number, add_size_flags, check_at_least, json_item, names_in, table
from .job import Job
from .ranks import take_turns

SUMMARY = "tokens per second of a small GPT, in our engine and in DeepSpeed's"
RIVAL = "deepspeed_1f1b"
SAMPLES, SEQ_LENGTH = 4, 128  # of a micro-batch
_WARM_UP = 2  # steps
_LIMIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmark."""
    add_size_flags(parser, num_devices=2, micro_batches=8)
    parser.add_argument("--schedules", default="1f1b", metavar="A,B", help="%(default)s")
    add_number(parser, "--steps", 10, "K", f"steps of each engine, after {_WARM_UP} warm-up steps")


def measure(args: argparse.Namespace) -> Report:
    """Measure our schedules and DeepSpeed's engine.

    Raises:
        ConfigError: a flag is wrong.
        RankFailure: an engine failed.
    """
    check_at_least("--steps", args.steps, 1)
    ours = names_in(args.schedules)
    for name in ours:
        get_schedule(name).timetable(args.num_devices, args.micro_batches)
    job = Job(build, args.num_devices, _LIMIT_S, args.micro_batches)
    tokens = args.micro_batches * SAMPLES * SEQ_LENGTH
    speeds: dict[str, list[float]] = {}
    for name, run in take_turns([*ours, RIVAL], job, _WARM_UP + args.steps).items():
        times = (zip(*answers, strict=True) for answers in run.rounds[_WARM_UP:])
        speeds[name] = [tokens / (max(ends) - min(starts)) for starts, ends in times]
    sizes = {"stages": args.num_devices, "micro_batches": args.micro_batches}
    items, rows = [], [("engine", "tokens/s", "best", f"ratio to {RIVAL}")]
    for name, values in speeds.items():
        median = statistics.median(values)
        ratio = median / statistics.median(speeds[RIVAL])
        items.append(json_item(name, {**sizes, "ratio": ratio}, values, "tokens/s", best=max))
        rows.append((name, f"{median:.0f}", f"{max(values):.0f}", f"{ratio:.3f}"))
    text = table(rows)
    if args.num_devices > usable_cores():
        text += (
            f"\n{args.num_devices} ranks on {usable_cores():g} cores: figures hardly depend on the engines."
        )
    return Report(items, f"{args.num_devices} devices, {args.micro_batches} micro-batches", text)


@dataclass(frozen=True)
class TrainingEngine:
    """Engine of this rank; ``step()`` trains one step."""

    step: Callable[[], float]
    timetable: Timetable

    def run(self) -> tuple[float, float]:
        """Return (start, end) of one step, which ends when all ranks have finished it."""
        import torch.distributed as dist

        start = time.perf_counter()
        self.step()
        dist.barrier()
        return start, time.perf_counter()


def build(name: str, job: Job) -> TrainingEngine:
    """Build the engine called ``name``: DeepSpeed's, or ours with the schedule of that name."""
    import torch

    from ..models.gpt import GPTConfig, gpt_layer_specs, gpt_loss
    from ..tensor_parallel import DropoutClock, TensorParallel
    from .rivals import Workload

    # A small model, so that the engine's share of a step shows: about 0.8 million parameters per layer.
    config = GPTConfig(
        num_layers=8,
        hidden_size=256,
        num_attention_heads=4,
        seq_length=SEQ_LENGTH,
        vocab_size=2048,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    shape = (job.micro_batches, SAMPLES, SEQ_LENGTH + 1)
    ids = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    clock, tp = DropoutClock(), TensorParallel()
    workload = Workload(
        gpt_layer_specs(config, tp, clock),
        [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in ids],
        loss_fn=gpt_loss(config, tp),
        partition_method="type:TransformerLayer",
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    )
    schedule = get_schedule("1f1b" if name == RIVAL else name)
    timetable = schedule.timetable(job.num_ranks, job.micro_batches)
    if name == RIVAL:
        _, step = workload.in_deepspeeds(job.num_ranks)
    else:
        _, step = workload.in_ours(job, timetable, clock)
    return TrainingEngine(step, timetable)
