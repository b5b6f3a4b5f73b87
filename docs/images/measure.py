"""Measure the picture of the README, in about a minute:

    for schedule in 1f1b bitpipe_zb; do
      torchrun --nproc_per_node 4 docs/images/measure.py $schedule build/picture/$schedule
    done
    python -m ds_ext trace view build/picture/1f1b build/picture/bitpipe_zb -o docs/images/measured.svg

The layers wait instead of computing, as those of `python -m ds_ext bench schedules`, so 4 ranks need no 4 devices. A
forward of a quarter of the model takes 40 ms, or the milliseconds in a third argument, and so do both halves of its
backward.
"""

import sys

import torch
from deepspeed.pipe import LayerSpec

import ds_ext
from benchmarks.emulated import EmulatedDevice, EmulatedLayer, make_batches, rows_of, set_exact_timers
from benchmarks.rivals import SameBatches
from ds_ext.launch import process
from ds_ext.pipe_schedules import Costs, timetable

DEVICES, MICRO_BATCHES, STEPS = 4, 8, 7


def main() -> None:
    """Train some steps with the schedule and the folder of the command line."""
    schedule, folder, *forward = sys.argv[1:]
    forward_ms = float(forward[0]) if forward else 40.0
    set_exact_timers()
    ds_ext.init_distributed()
    placement = timetable(schedule, DEVICES, MICRO_BATCHES).placement
    device = EmulatedDevice(Costs(forward_ms, forward_ms, forward_ms), placement)
    batches = make_batches(MICRO_BATCHES, rows_of(4.0))
    config = {
        "train_batch_size": MICRO_BATCHES * len(batches[0][0]),
        "train_micro_batch_size_per_gpu": len(batches[0][0]),
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "steps_per_print": 10**9,
        "ds_ext": {
            "schedule": schedule,
            "pipeline_parallel_size": DEVICES,
            "trace": {"dir": folder, "steps": "3:"},
        },
    }
    layers = [LayerSpec(EmulatedLayer, stage, device) for stage in range(placement.stages)]
    model = ds_ext.PipelineModule(
        layers, config, loss_fn=torch.nn.functional.mse_loss, clock=device, partition_method="uniform"
    )
    engine, *_ = ds_ext.initialize(model=model, config=config)
    device.split_backwards = engine.plan.timetable.split_backwards
    data = SameBatches(batches)
    metrics = ds_ext.Metrics(engine, total_steps=STEPS, log_interval=1)
    for _ in range(STEPS):
        device.start_step()
        metrics.log(engine.train_batch(data))


if __name__ == "__main__":
    process.run(main)
