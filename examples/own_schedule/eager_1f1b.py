"""1F1B with more warm-up forwards, which hides slow messages. See docs/add_a_schedule.md.

python examples/own_schedule/eager_1f1b.py
torchrun --nproc_per_node 4 examples/own_model.py --deepspeed_config examples/own_schedule/eager_1f1b.json
"""

from collections.abc import Iterator

from ds_ext.pipe_schedules import (
    BACKWARD,
    FORWARD,
    Costs,
    Op,
    check,
    linear,
    lower,
    schedule,
    simulate,
    time_grid,
    timetable,
)


@schedule("eager_1f1b", place=linear)
def eager_1f1b(device: int, num_devices: int, micro_batches: int) -> Iterator[Op]:
    """1F1B with twice the warm-up: hides slow messages, keeps up to 2(D - device) - 1 activations."""
    warmup = min(2 * (num_devices - device - 1), micro_batches)
    for step in range(micro_batches + warmup):
        if step < micro_batches:
            yield Op(FORWARD, step, device)
        if step >= warmup:
            yield Op(BACKWARD, step - warmup, device)


if __name__ == "__main__":
    eager = timetable("eager_1f1b", 4, 8)
    print(check(lower(eager)))
    print(time_grid(simulate(eager)))
    for name in ("1f1b", "eager_1f1b"):
        slow = simulate(timetable(name, 4, 8), Costs(comm=0.5))
        print(name, slow.makespan, slow.peak_activations)
