"""All arrival orders of small pipelines: every micro-batch ends, within the activation limits.

The checker explores every state that the devices' policies can come to: a message may arrive, or a device end its
computation, at any time and in any order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from heapq import heappop
from typing import Any

import pytest

from ds_ext.pipe_schedules import Op, Placement, get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.dynamic import DynamicRules, Greedy
from ds_ext.pipe_schedules.events import Workload
from ds_ext.pipe_schedules.placement import bidirectional_v, linear, looped, v
from tests.timetables import followers


class State:
    """State of the devices and of the messages in flight."""

    def __init__(self, work: Workload, devices: list[Any]) -> None:
        self.work, self.devices = work, devices
        self.busy: list[Op | None] = [None] * len(devices)
        self.under_way: frozenset[Op] = frozenset()
        self.done = 0

    def choose(self) -> None:
        """Start the chosen op on every free device."""
        for device, policy in enumerate(self.devices):
            if self.busy[device] is None:
                self.busy[device] = policy.choose()

    def key(self) -> object:
        """Return a key that is equal for equivalent states."""
        return tuple(map(contents, self.devices)), tuple(self.busy), self.under_way

    def successors(self, late: bool) -> list[State]:
        """Return the next states. Unless ``late``, messages arrive as soon as they are sent."""
        found = []
        for device, op in enumerate(self.busy):
            if op is None:
                continue
            after = self._copy()
            after.busy[device] = None
            after.done += 1
            after.devices[device].mark_done(op)
            for follower, at in followers(self.work, op):
                if late and at != device:
                    after.under_way |= {follower}
                else:
                    after.devices[at].add_ready(follower)
            after.choose()
            found.append(after)
        for op in self.under_way:
            after = self._copy()
            after.under_way -= {op}
            after.devices[self.work.dependencies.device(op)].add_ready(op)
            after.choose()
            found.append(after)
        return found

    def _copy(self) -> State:
        after = copy.copy(self)
        shared = {id(policy.rules): policy.rules for policy in self.devices}
        after.devices, after.busy = copy.deepcopy(self.devices, shared), list(self.busy)
        return after


def contents(policy: Any) -> str:
    """Return the state of a policy, with heaps sorted."""
    own = {
        k: sorted(x) if isinstance(x, list) and x and isinstance(x[0], tuple) else x
        for k, x in vars(policy).items()
    }
    del own["rules"]
    return repr(own)


def explore(
    work: Workload, devices: list[Any], late: bool, check: Callable[[State], None]
) -> tuple[int, bool]:
    """Return the number of states, and whether every state without a successor is the end of the step."""
    first = State(work, devices)
    for op in work.entries():
        devices[work.dependencies.device(op)].add_ready(op)
    first.choose()
    seen, stack, ends = {first.key()}, [first], True
    while stack:
        state = stack.pop()
        check(state)
        following = state.successors(late)
        ends = ends and (bool(following) or state.done == work.num_ops)
        for after in following:
            key = after.key()
            if key not in seen:
                seen.add(key)
                stack.append(after)
    return len(seen), ends


def rules_of(placement: Placement, n: int, **options: Any) -> tuple[DynamicRules, Workload]:
    method = get_schedule("dpp")
    assert method.dynamic is not None
    values = method.resolve_options(options)
    rules = method.dynamic(placement, n, values)
    return rules, Workload(placement, n, Costs(), rules.split)


SMALL = [
    (linear(2), 4, 2, {}),
    (linear(3), 3, 2, {}),
    (linear(3), 2, 2, {"backward": "split"}),
    (looped(2, 2), 3, 2, {"policy": "breadth"}),
    (v(2), 3, 2, {"policy": "breadth"}),
    (v(2), 2, 2, {"policy": "depth", "backward": "split"}),
    (v(3), 2, 2, {}),
    (v(2), 4, 4, {"policy": "breadth", "max_activations": 1}),
    (v(2), 2, 2, {"policy": "breadth", "max_activations": 1.5, "backward": "split"}),
    (v(3), 3, 3, {"max_activations": 1}),
    (looped(2, 2), 4, 4, {"policy": "breadth", "max_activations": 1}),
    (bidirectional_v(2), 4, 4, {"policy": "breadth", "max_activations": 2}),
    (bidirectional_v(2), 3, 2, {"policy": "breadth"}),
    (bidirectional_v(2), 2, 2, {"backward": "split"}),
]


@pytest.mark.parametrize(("placement", "n", "in_flight", "options"), SMALL, ids=str)
def test_every_arrival_order_ends_within_its_memory(
    placement: Placement, n: int, in_flight: int, options: dict[str, Any]
) -> None:
    rules, work = rules_of(placement, n, max_in_flight=in_flight, **options)

    def within_memory(state: State) -> None:
        assert all(sum(policy.live.values()) <= rules.max_live[d] for d, policy in enumerate(state.devices))

    states, ends = explore(work, [rules.device(d) for d in range(placement.num_devices)], True, within_memory)
    assert ends and states > 20


class CappedPerRank(Greedy):
    """Unsafe rule: every device limits its live chunks, without admission."""

    def __init__(self, rules: DynamicRules, device: int, cap: int) -> None:
        super().__init__(rules, device)
        self.cap = cap
        self._credits = [rules.micro_batches] * rules.placement.replicas

    def choose(self) -> Op | None:
        if self._backwards:
            return self._take_backward()
        if self._forwards and sum(self.live.values()) < self.cap:
            op = heappop(self._forwards)[1]
            self.live[self._stage(op)] += 1
            return op
        return None


@pytest.mark.parametrize(
    ("placement", "n", "cap"), [(v(2), 4, 2), (v(2), 5, 3), (bidirectional_v(2), 4, 2)], ids=str
)
def test_a_cap_on_live_chunks_of_each_rank_deadlocks(placement: Placement, n: int, cap: int) -> None:
    """A device full of first chunks deadlocks: their micro-batches need its second chunk to continue."""
    rules, work = rules_of(placement, n, policy="breadth")
    devices: Sequence[Any] = [CappedPerRank(rules, d, cap) for d in range(placement.num_devices)]
    assert not explore(work, list(devices), True, lambda state: None)[1]
    # The same cap, with a place left for every stage, does not.
    if cap >= len(placement.chunks[0]):
        safe, work = rules_of(placement, n, policy="breadth", max_in_flight=n, max_activations=cap / 2)
        assert explore(
            work, [safe.device(d) for d in range(placement.num_devices)], True, lambda state: None
        )[1]
