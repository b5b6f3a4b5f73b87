"""BitPipe: two V-shaped pipes in opposite directions (arXiv 2410.19367). ::

    rank 0  0 1 . 2 2 3 3 0 0'- 1 1'- . 2'- 2'- 3'- 3'- 0'- . . 1'-
    rank 1  . 0 2 1 3 2 0 3 1 . 0'- 2'- 1'- 3'- 2'- 0'- 3'- 1'- . .
    rank 2  . 2 0 3 1 0 2 1 3 . 2'- 0'- 3'- 1'- 0'- 2'- 1'- 3'- . .
    rank 3  2 3 . 0 0 1 1 2 2'- 3 3'- . 0'- 0'- 1'- 1'- 2'- . . 3'-

Micro-batches 0 and 1 take the down pipe from rank 0 to rank 3 and back, 2 and 3 the up pipe from rank 3 to rank 0
and back.

The order is a closed form. Micro-batches come in *basic units* of D: n = D/2 for each pipe. A device's *home* pipe
is the one that starts nearer to it; ``k`` is how many micro-batches of its home pipe it takes before the other
pipe's first arrives.

That is mode "unit". Mode "greedy" plans an order for any N and any costs (:mod:`..list_scheduling.search`); it takes
less time and holds more activations.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ScheduleError
from ..costs import Costs
from ..list_scheduling.search import plan
from ..ops import BACKWARD, FORWARD, Op
from ..placement import Placement, bidirectional_v
from ..registry import Option, Orders, check_multiple, every_rank, planned_schedule


@planned_schedule(
    "bitpipe",
    place=bidirectional_v,
    even_devices=True,
    options={
        "mode": Option(
            "unit", None, "unit: the closed form; greedy: any N, planned for the costs", ("unit", "greedy")
        ),
        "max_activations": Option(
            0.0, 0, "greedy: most activations a device keeps, in D-ths of the model; 0: 1.5 D"
        ),
    },
    variants=lambda num_devices, micro_batches: [
        {"mode": "unit"},
        {"mode": "greedy"},
        {"mode": "greedy", "max_activations": num_devices},
    ],
)
def bitpipe(
    placement: Placement, micro_batches: int, costs: Costs, mode: str, max_activations: float
) -> Orders:
    """Two opposing V-shaped pipes: bubble (D-2)/(3N+D-2) at N = D, for twice the weights."""
    if mode == "greedy":
        most = max_activations or 1.5 * placement.num_devices
        return plan("bitpipe", placement, micro_batches, costs, split=False, max_activations=most)
    if max_activations:
        raise ScheduleError(
            f'bitpipe: max_activations {max_activations:g} is for mode "greedy"; mode "unit" keeps at most '
            f"{placement.num_devices} (D-ths of the model)."
        )
    check_multiple(
        "bitpipe", micro_batches, placement, ' Or give it the option "mode": "greedy", for any number.'
    )
    return every_rank(closed_form, placement, micro_batches)


def closed_form(device: int, num_devices: int, micro_batches: int) -> Iterator[Op]:
    """The order of ``device`` for N a multiple of D."""
    units = micro_batches // num_devices
    warmup = num_devices + num_devices // 2 + min(device, num_devices - 1 - device)
    pairs = 2 * num_devices - warmup
    forwards, backwards = [], []
    for unit in range(units):
        forwards += [
            Op(FORWARD, *where)
            for where in unit_order(device, num_devices, micro_batches, unit, backward=False)
        ]
        backwards += [
            Op(BACKWARD, *where)
            for where in unit_order(device, num_devices, micro_batches, unit, backward=True)
        ]
    forward, backward = iter(forwards), iter(backwards)

    def take(source: Iterator[Op], count: int) -> Iterator[Op]:
        return (next(source) for _ in range(count))

    # Fill the pipes with the first unit.
    yield from take(forward, warmup)
    for _ in range(units - 1):
        # One forward, one backward: the rest of this unit's forwards against its first backwards.
        for _ in range(pairs):
            yield next(forward)
            yield next(backward)
        # The seam: this unit drains while the next one fills the devices that run dry.
        yield from take(backward, warmup - pairs + 1)
        for _ in range(pairs - 1):
            yield next(forward)
            yield next(backward)
        yield from take(forward, warmup - pairs + 1)
    # The last unit: the remaining pairs, then drain.
    for _ in range(pairs):
        yield next(forward)
        yield next(backward)
    yield from backward


def unit_order(
    device: int, num_devices: int, micro_batches: int, unit: int, *, backward: bool
) -> Iterator[tuple[int, int]]:
    """The 2D (micro-batch, stage) of one basic unit in the order that ``device`` computes them.

    ``near`` is the half of the model that the direction meets first: the first half of the stages going
    forward, the second half going backward. The other pipe runs the mirrored device.
    """
    n = num_devices // 2
    home = 0 if device < n else 1
    k = n - device if device < n else device - n + 1

    def at(pipe: int, far: bool, i: int) -> tuple[int, int]:
        at_device = device if pipe == 0 else num_devices - 1 - device
        stage = 2 * num_devices - 1 - at_device if far != backward else at_device
        return pipe * (micro_batches // 2) + unit * n + i, stage

    other, near, far = 1 - home, False, True
    for i in range(k):
        yield at(home, near, i)
    for i in range(n - k):
        yield at(other, near, i)
        yield at(home, near, k + i)
    for i in range(k):
        yield at(other, near, n - k + i)
        yield at(other, far, i)
    for i in range(n - k):
        yield at(home, far, i)
        yield at(other, far, k + i)
    for i in range(n - k, n):
        yield at(home, far, i)
