"""Zero bubble: the backward is split, and weight gradients fill the waits (arXiv 2401.10241, 2405.15362).

``2'`` is the input gradient (I) of micro-batch 2, which the previous stage waits for, ``2"`` its weight gradient (W),
which no op waits for. All three are the tick rule of :mod:`..tick_rule` on a placement, with at most D activations on
a device; where it takes no longer, weight gradients come earlier, so that a message may be a little late. `zb_h1`, one
linear pipe (2401.10241, section 2.2)::

    rank 0  0  1  2  3  .  .  .  0' 0" 1' 1" 2' 2" 3' 3"
    rank 1  .  0  1  2  .  .  0' 3  1' 0" 2' 1" 3' 2" 3"
    rank 2  .  .  0  1  .  0' 2  1' 3  2' 0" 3' 1" 2" 3"
    rank 3  .  .  .  0  0' 1  1' 2  2' 3  3' 0" 1" 2" 3"

`zb_v`, one V-shaped pipe, so that the loss is on rank 0 and all ranks keep equally much (2405.15362, section 3)::

    rank 0  0  1  2  3  .  .  .  0  0' 1  1' 0" 2  2' 1" 3  3' 2" 0' 3" 1' 0" 1" 2' 2" 3' 3"
    rank 1  .  0  1  2  .  .  0  3  1  0' 2  1' 0" 3  2' 1" 0' 3' 1' 2" 0" 2' 3" 1" 3' 2" 3"
    rank 2  .  .  0  1  .  0  2  1  3  2  0' 3  1' 0" 0' 2' 1' 1" 3' 2' 0" 2" 3' 1" 3" 2" 3"
    rank 3  .  .  .  0  0  1  1  2  2  3  3  0' 0' 1' 1' 0" 2' 2' 0" 3' 3' 1" 1" 2" 2" 3" 3"

`bitpipe_zb`, BitPipe's two V-shaped pipes::

    rank 0  0  1  .  2  2  3  3  0  0' 0" 1  1' 1" 2' 2' 2" 3' 3' 2" 0' 3" 3" 1' 0" 1"
    rank 1  .  0  2  1  3  2  0  3  1  0' 0" 2' 1' 2" 3' 2' 1" 0' 3' 3" 1' 2" 0" 3" 1"
    rank 2  .  2  0  3  1  0  2  1  3  2' 2" 0' 3' 0" 1' 0' 3" 2' 1' 1" 3' 0" 2" 1" 3"
    rank 3  2  3  .  0  0  1  1  2  2' 2" 3  3' 3" 0' 0' 0" 1' 1' 0" 2' 1" 1" 3' 2" 3"
"""

from __future__ import annotations

from collections.abc import Iterator

from ..costs import Costs
from ..events import Work
from ..list_scheduling.dispatch import fill_waits
from ..list_scheduling.search import plan, slow_links, unhurried
from ..ops import Op
from ..placement import Placement, bidirectional_v, linear, v
from ..registry import Option, Orders, planned_schedule, schedule
from ..tick_rule import split_order

_MAX_ACTIVATIONS = Option(
    0.0, 0, "most activations a device keeps, in D-ths of the model; 0: D, and 1.5 D if messages take time"
)


@schedule("zb_h1", place=linear)
def zb_h1(device: int, num_devices: int, micro_batches: int) -> Iterator[Op]:
    """1F1B with split backwards: (D-1)F beyond ideal when F = I = W, a third of 1F1B's, for D activations."""
    return split_order(device, linear(num_devices), micro_batches)


@planned_schedule(
    "zb_v",
    place=v,
    options={"max_activations": _MAX_ACTIVATIONS},
    variants=lambda num_devices, micro_batches: [
        {},
        {"max_activations": num_devices},
        {"max_activations": 1.5 * num_devices},
    ],
)
def zb_v(placement: Placement, micro_batches: int, costs: Costs, max_activations: float) -> Orders:
    """A V-shaped pipe with split backwards: (D-1)F/2 beyond ideal when F = I = W, for D activations."""
    return _order("zb_v", placement, micro_batches, costs, max_activations)


@planned_schedule(
    "bitpipe_zb",
    place=bidirectional_v,
    even_devices=True,
    options={
        "waves": Option(1, 1, "times a pipe goes there and back over the devices"),
        "max_activations": _MAX_ACTIVATIONS,
    },
    variants=lambda num_devices, micro_batches: [
        {"waves": 1},
        {"waves": 2},
        {"waves": 1, "max_activations": num_devices},
        {"waves": 1, "max_activations": 1.5 * num_devices},
    ],
)
def bitpipe_zb(
    placement: Placement, micro_batches: int, costs: Costs, waves: int, max_activations: float
) -> Orders:
    """BitPipe with split backwards: (D-2)F/4 beyond ideal when F = I = W, over waves; twice the weights."""
    return _order("bitpipe_zb", placement, micro_batches, costs, max_activations)


def _order(
    name: str, placement: Placement, micro_batches: int, costs: Costs, max_activations: float
) -> Orders:
    """The slot rule where it reaches the bound, else the best order that planning finds."""
    num_devices = placement.num_devices
    # What planning would come to as well, in no time.
    equal = costs == Costs(costs.forward, costs.forward, costs.forward)
    if equal and not max_activations and micro_batches % num_devices == 0:
        orders = tuple(tuple(split_order(device, placement, micro_batches)) for device in range(num_devices))
        work = Work(placement, micro_batches, costs, split=True)
        slow = slow_links(work)
        assert slow is not None
        return unhurried(work, orders, fill_waits(slow, orders, placement.stages), placement.stages)
    most = max_activations or (1.5 if costs.comm or any(costs.links.values()) else 1) * num_devices
    return plan(name, placement, micro_batches, costs, split=True, max_activations=most)
