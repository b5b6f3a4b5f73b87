"""BitPipe: two V-shaped pipes in opposite directions (arXiv 2410.19367). ::

    device 0  0 1 . 2 2 3 3 0 0'- 1 1'- . 2'- 2'- 3'- 3'- 0'- . . 1'-
    device 1  . 0 2 1 3 2 0 3 1 . 0'- 2'- 1'- 3'- 2'- 0'- 3'- 1'- . .
    device 2  . 2 0 3 1 0 2 1 3 . 2'- 0'- 3'- 1'- 0'- 2'- 1'- 3'- . .
    device 3  2 3 . 0 0 1 1 2 2'- 3 3'- . 0'- 0'- 1'- 1'- 2'- . . 3'-

The down pipe (micro-batches 0 and 1) starts and ends on device 0 and turns at device 3. The up pipe (2 and 3) starts
and ends on device 3 and turns at device 0.

Mode "unit" is a closed form of the paper's order. A *basic unit* is D micro-batches, n = D/2 per pipe. The *home* pipe
of a device is the one whose start is nearer. ``k`` is the number of micro-batches of the home pipe that the device
computes before the first one of the other pipe arrives.

Mode "greedy" plans an order for any N and costs (:mod:`..list_scheduling.search`). It is faster and keeps more
activations.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ScheduleError
from ..costs import Costs
from ..definition import Option, Orders, check_multiple, every_device
from ..list_scheduling.search import plan
from ..ops import BACKWARD, FORWARD, Op
from ..placement import Placement, bidirectional_v
from ..registry import planned_schedule


@planned_schedule(
    "bitpipe",
    place=bidirectional_v,
    even_devices=True,
    options={
        "mode": Option(
            "unit", None, "unit: closed form; greedy: planned for the costs, any N", ("unit", "greedy")
        ),
        "max_activations": Option(
            0.0, 0, "greedy: maximum live activations per device, in units of 1/D of the model; 0: 1.5 D"
        ),
    },
    variants=lambda num_devices, micro_batches: [
        {"mode": "unit"},
        {"mode": "greedy"},
        {"mode": "greedy", "max_activations": num_devices},
    ],
)
def bitpipe(
    placement: Placement, micro_batches: int, costs: Costs, mode: str, max_activations: float, slices: int
) -> Orders:
    """Two V-shaped pipes in opposite directions: bubble (D-2)/(3N+D-2) at N = D, twice the weights."""
    if mode == "greedy":
        most = max_activations or 1.5 * placement.num_devices
        return plan(
            "bitpipe", placement, micro_batches, costs, split=False, max_activations=most, slices=slices
        )
    if slices > 1:
        raise ScheduleError(
            f'bitpipe: sequence_slices need mode "greedy" (got {slices} with mode "unit"). Set the mode, or use 1.'
        )
    if max_activations:
        raise ScheduleError(
            f'bitpipe: max_activations needs mode "greedy" (got {max_activations:g} with mode "unit", which keeps at '
            f"most {placement.num_devices}). Remove it, or set the mode."
        )
    check_multiple(
        "bitpipe", micro_batches, placement, ' Or set the option "mode" to "greedy", which accepts any N.'
    )
    return every_device(closed_form, placement, micro_batches)


def closed_form(device: int, num_devices: int, micro_batches: int) -> Iterator[Op]:
    """Yield the ops of ``device``; N must be a multiple of D."""
    units = micro_batches // num_devices
    warmup = num_devices + num_devices // 2 + min(device, num_devices - 1 - device)
    pairs = 2 * num_devices - warmup
    forwards, backwards = [], []
    for unit in range(units):
        forwards += [
            Op(FORWARD, m, stage)
            for m, stage in unit_order(device, num_devices, micro_batches, unit, backward=False)
        ]
        backwards += [
            Op(BACKWARD, m, stage)
            for m, stage in unit_order(device, num_devices, micro_batches, unit, backward=True)
        ]
    forward, backward = iter(forwards), iter(backwards)

    def take(source: Iterator[Op], count: int) -> Iterator[Op]:
        return (next(source) for _ in range(count))

    # Warm-up: fill the pipes with the first unit.
    yield from take(forward, warmup)
    for _ in range(units - 1):
        # Steady state: the remaining forwards of this unit alternate with its first backwards.
        for _ in range(pairs):
            yield next(forward)
            yield next(backward)
        # Seam: the next unit fills the pipes while this one drains.
        yield from take(backward, warmup - pairs + 1)
        for _ in range(pairs - 1):
            yield next(forward)
            yield next(backward)
        yield from take(forward, warmup - pairs + 1)
    # Last unit: the remaining pairs, then the cool-down.
    for _ in range(pairs):
        yield next(forward)
        yield next(backward)
    yield from backward


def unit_order(
    device: int, num_devices: int, micro_batches: int, unit: int, *, backward: bool
) -> Iterator[tuple[int, int]]:
    """Yield the 2D (micro-batch, stage) pairs of one basic unit in the order of ``device``.

    ``near`` is the half of the model that is computed first: the first half of the stages for forwards, the second half
    for backwards. In the other pipe, the device is mirrored.
    """
    n = num_devices // 2
    home = 0 if device < n else 1
    k = n - device if device < n else device - n + 1

    def pair(pipe: int, far: bool, i: int) -> tuple[int, int]:
        position = device if pipe == 0 else num_devices - 1 - device
        stage = 2 * num_devices - 1 - position if far != backward else position
        return pipe * (micro_batches // 2) + unit * n + i, stage

    opposite, near, far = 1 - home, False, True
    for i in range(k):
        yield pair(home, near, i)
    for i in range(n - k):
        yield pair(opposite, near, i)
        yield pair(home, near, k + i)
    for i in range(k):
        yield pair(opposite, near, n - k + i)
        yield pair(opposite, far, i)
    for i in range(n - k):
        yield pair(home, far, i)
        yield pair(opposite, far, k + i)
    for i in range(n - k, n):
        yield pair(home, far, i)
