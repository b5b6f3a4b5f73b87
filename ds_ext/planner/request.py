"""Request of a search for a schedule: sizes, costs and limits, with lower bounds that hold for every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import ConfigError, ScheduleError
from ..parallel.network import Network
from ..parallel.slices import BALANCED
from ..pipe_schedules.costs import Costs
from .activations import layer_activations
from .candidates import SAME, is_too_large
from .stage_costs import slice_tokens
from .step_time import least_collectives_s, on_devices
from .text import format_bytes
from .training_sizes import RECOMPUTATIONS, TrainingSizes

SortKey = tuple[
    float, float
]  # 0 and the time of a candidate that fits, 1 and the bytes of one that is too large


@dataclass(frozen=True)
class Request:
    """Sizes, costs and limits to choose a schedule for.

    Args:
        devices: D, devices of a pipeline group.
        micro_batches: N, micro-batches per pipeline group and step, over all pipes.
        costs: costs of 1/D of the model without recomputation.
        sizes: the model; :meth:`kinds` sets its ``recompute``. None: layers and memory are not considered.
        memory_bytes: memory limit of a device; None: no limit.
        cheap_ops: number of ops that a schedule may plan even if its bound rules it out.
        margin: relative saving below which a candidate is not evaluated.
        stage_layers: layers of every stage, in the format of the scripts' flag; None: balanced by work.
        max_stages: number of pipeline layers of the model, one per stage at least; None: unknown.
        intervals: intervals of full recomputation to evaluate.
        network: hosts for the parallel sizes in ``sizes``. Candidates are simulated with its messages and collectives.
            Their orders are planned for free messages, so that candidates share them.
        unit_s: unit of the costs in seconds. With a network, times of candidates are in seconds.
        unsharded_alone: a single copy of the weights uses no ZeRO.
        slices: with several, only schedules that have slices are evaluated.
        lengths: tokens of every slice.
        head_parts: every device computes a part of the head. Schedules without support are refused.
        plans_orders: schedules that plan their order are evaluated.
    """

    devices: int
    micro_batches: int
    costs: Costs = field(default_factory=Costs)
    sizes: TrainingSizes | None = None
    memory_bytes: int | None = None
    recompute: tuple[str, ...] = RECOMPUTATIONS
    cheap_ops: int = 30_000  # a tenth of a second
    margin: float = 0.0
    stage_layers: str | None = None
    max_stages: int | None = None
    intervals: tuple[int, ...] = (1,)
    network: Network | None = None
    unit_s: float = 1.0
    unsharded_alone: bool = False
    slices: int = 1
    lengths: str | tuple[int, ...] = BALANCED
    head_parts: bool = False
    plans_orders: bool = True

    def __post_init__(self) -> None:
        for name in ("devices", "micro_batches", "memory_bytes", "slices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ScheduleError(f"{name}: must be at least 1 (got {value}).")
        if self.memory_bytes is not None and self.sizes is None:
            raise ScheduleError(
                f"memory limit: needs the sizes of the model (got {format_bytes(self.memory_bytes)}, no sizes)."
            )
        if not set(self.recompute) <= set(RECOMPUTATIONS):
            kinds = ", ".join(self.recompute)
            raise ScheduleError(f"recompute: unknown kind (got {kinds}). Use {', '.join(RECOMPUTATIONS)}.")

    def kinds(self) -> Iterator[Request]:
        """Yield a request for every kind and interval of recomputation that differs for this model."""
        sizes, kinds = self.sizes, self.recompute
        if sizes is None:
            kinds = RECOMPUTATIONS[:1]
        elif not sizes.attention_scores:
            kinds = tuple(kind for kind in kinds if kind != "selective") or kinds
        for kind in kinds:
            for interval in self.intervals if kind == "full" else (1,):
                yield self.with_recomputation(kind, interval)

    def with_recomputation(self, kind: str, interval: int) -> Request:
        sizes = self.sizes and replace(self.sizes, recompute=kind, recompute_interval=interval)
        return replace(self, sizes=sizes, recompute=(kind,), intervals=(interval,))

    @property
    def bound(self) -> SortKey:
        """Lower bound on the sort key of every schedule; the average device counts. 0 without a network."""
        sizes = self.sizes
        if self.network is None or sizes is None:
            return (0.0, 0.0)
        parameters = sizes.num_layers * sizes.layer_parameters
        kept = sizes.bytes.weights + sizes.bytes.gradients
        plain = sizes.num_layers - -(-sizes.num_layers // sizes.recompute_interval)
        activations = plain * layer_activations(sizes, "none").kept
        activations += (sizes.num_layers - plain) * layer_activations(sizes, sizes.recompute).kept
        need = (parameters * kept + activations) / self.devices
        return sort_key(is_too_large(int(need), self.memory_bytes), self._least_time(sizes), int(need))

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of every slice of a sample; empty for one."""
        sizes = self.sizes
        if self.slices == 1 or sizes is None:
            return ()
        shards = sizes.tensor_parallel if sizes.sequence_parallel else 1
        try:
            return slice_tokens(sizes, self.slices, self.lengths, shards)
        except ConfigError as error:
            raise ScheduleError(str(error)) from None

    def on_network(self, costs: Costs) -> Costs:
        """Return the costs with the tensor-parallel all-reduces of the network."""
        if self.network is None or self.sizes is None:
            return costs
        return on_devices(costs, self.sizes, self.network, self.devices, self.unit_s, self.slices)

    def collectives(self, replicas: int, reduced: float, gathered: float) -> float:
        """Return a lower bound on the time of the collectives after the last op, in the unit of candidates' times.

        ``replicas`` are copies of the weights in a pipeline group. ``reduced`` and ``gathered`` are parameters whose
        gradients are reduced, and whose weights are gathered, after the last op.
        """
        sizes = self.sizes
        if self.network is None or sizes is None:
            return 0.0
        volumes = reduced * sizes.bytes.reduced, gathered * sizes.bytes.weights * sizes.bytes.sharded
        if sizes.overlap_across_steps and sizes.bytes.sharded:
            volumes = volumes[0] / 2, 0.0  # scattered, and beside the next step
        return least_collectives_s(
            self.network, sizes.tensor_parallel, replicas * sizes.data_parallel, *volumes
        )

    def _least_time(self, sizes: TrainingSizes) -> float:
        """Return a lower bound on the time of every schedule: the average work of a device."""
        costs = self.on_network(self.costs)
        repeated = sizes.repeated_share * sizes.num_layers / (sizes.num_layers + sizes.head_work())
        layers = sizes.num_layers / self.devices * sizes.layer_parameters
        work = costs.forward + costs.backward_input + costs.backward_weight + repeated * self.costs.forward
        makespan = self.micro_batches * work * (1 - costs.jitter) * (1 - SAME)
        return rounded_time(makespan * self.unit_s + self.collectives(1, 0.0, layers))


def sort_key(too_large: bool, time: float, size: float) -> SortKey:
    """Return a key that sorts fitting candidates by time, then too large ones by bytes."""
    return (1, size) if too_large else (0, time)


def rounded_time(time: float) -> float:
    """Return a time whose ties do not depend on the order of sums."""
    return float(f"{time:.6g}")
