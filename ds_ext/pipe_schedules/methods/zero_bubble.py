"""Zero bubble: split backwards, with weight gradients in idle time (arXiv 2401.10241, 2405.15362).

``2'`` is the input gradient (I) of micro-batch 2, which the previous stage waits for. ``2"`` is its weight gradient
(W), which no other op waits for. All three schedules apply the tick rule (:mod:`..tick_rule`) to a placement, with at
most D activations per device. Weight gradients move earlier where that does not lengthen the step; this reduces the
sensitivity to message latency.

``zb_h1``, one linear pipe (2401.10241, section 2.2)::

    device 0  0  1  2  3  .  .  .  0' 0" 1' 1" 2' 2" 3' 3"
    device 1  .  0  1  2  .  .  0' 3  1' 0" 2' 1" 3' 2" 3"
    device 2  .  .  0  1  .  0' 2  1' 3  2' 0" 3' 1" 2" 3"
    device 3  .  .  .  0  0' 1  1' 2  2' 3  3' 0" 1" 2" 3"

``zb_v``, one V-shaped pipe, with the loss on device 0 and balanced activations (2405.15362, section 3)::

    device 0  0  1  2  3  .  .  .  0  0' 1  1' 0" 2  2' 1" 3  3' 2" 0' 3" 1' 0" 1" 2' 2" 3' 3"
    device 1  .  0  1  2  .  .  0  3  1  0' 2  1' 0" 3  2' 1" 0' 3' 1' 2" 0" 2' 3" 1" 3' 2" 3"
    device 2  .  .  0  1  .  0  2  1  3  2  0' 3  1' 0" 0' 2' 1' 1" 3' 2' 0" 2" 3' 1" 3" 2" 3"
    device 3  .  .  .  0  0  1  1  2  2  3  3  0' 0' 1' 1' 0" 2' 2' 0" 3' 3' 1" 1" 2" 2" 3" 3"

``bitpipe_zb``, BitPipe's two V-shaped pipes::

    device 0  0  1  .  2  2  3  3  0  0' 0" 1  1' 1" 2' 2' 2" 3' 3' 2" 0' 3" 3" 1' 0" 1"
    device 1  .  0  2  1  3  2  0  3  1  0' 0" 2' 1' 2" 3' 2' 1" 0' 3' 3" 1' 2" 0" 3" 1"
    device 2  .  2  0  3  1  0  2  1  3  2' 2" 0' 3' 0" 1' 0' 3" 2' 1' 1" 3' 0" 2" 1" 3"
    device 3  2  3  .  0  0  1  1  2  2' 2" 3  3' 3" 0' 0' 0" 1' 1' 0" 2' 1" 1" 3' 2" 3"
"""

from __future__ import annotations

from collections.abc import Iterator

from ..costs import Costs
from ..definition import Option, Orders
from ..events import Workload
from ..list_scheduling.dispatch import fill_idle_time
from ..list_scheduling.search import less_sensitive, plan, with_slow_links
from ..ops import Op
from ..placement import Placement, bidirectional_v, linear, v
from ..registry import planned_schedule, schedule
from ..tick_rule import split_order

_MAX_ACTIVATIONS = Option(
    0.0,
    0,
    "maximum live activations per device, in units of 1/D of the model; 0: D, or 1.5 D if messages take time",
)


@schedule("zb_h1", place=linear)
def zb_h1(device: int, num_devices: int, micro_batches: int, slices: int) -> Iterator[Op]:
    """1F1B with split backwards: (D-1)F beyond ideal if F = I = W, a third of 1F1B's; D activations."""
    return split_order(device, linear(num_devices), micro_batches, slices)


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
def zb_v(
    placement: Placement, micro_batches: int, costs: Costs, max_activations: float, slices: int
) -> Orders:
    """A V-shaped pipe with split backwards: (D-1)F/2 beyond ideal if F = I = W; D activations."""
    return _order("zb_v", placement, micro_batches, costs, max_activations, slices)


@planned_schedule(
    "bitpipe_zb",
    place=bidirectional_v,
    even_devices=True,
    options={"waves": Option(1, 1, "consecutive Vs per pipe"), "max_activations": _MAX_ACTIVATIONS},
    variants=lambda num_devices, micro_batches: [
        {"waves": 1},
        {"waves": 2},
        {"waves": 1, "max_activations": num_devices},
        {"waves": 1, "max_activations": 1.5 * num_devices},
    ],
)
def bitpipe_zb(
    placement: Placement, micro_batches: int, costs: Costs, waves: int, max_activations: float, slices: int
) -> Orders:
    """BitPipe with split backwards: (D-2)F/(4 waves) beyond ideal if F = I = W; twice the weights."""
    return _order("bitpipe_zb", placement, micro_batches, costs, max_activations, slices)


def _order(
    name: str, placement: Placement, micro_batches: int, costs: Costs, max_activations: float, slices: int
) -> Orders:
    """Return the orders of the tick rule where it reaches the lower bound, else planned orders."""
    num_devices = placement.num_devices
    # The search would find the same orders, more slowly.
    equal = costs == Costs(costs.forward, costs.forward, costs.forward)
    if equal and slices == 1 and not max_activations and micro_batches % num_devices == 0:
        orders = tuple(tuple(split_order(device, placement, micro_batches)) for device in range(num_devices))
        workload = Workload(placement, micro_batches, costs, split=True)
        slow = fill_idle_time(with_slow_links(workload), orders, placement.stages)
        return less_sensitive(workload, orders, slow, placement.stages)
    most = max_activations or (1 if costs.free_messages else 1.5) * num_devices
    return plan(name, placement, micro_batches, costs, split=True, max_activations=most, slices=slices)
