"""Tensor-, pipeline- and data-parallel sizes of a job for a cluster, each with its best schedule.

A device computes at a given rate, and messages have a given bandwidth. The forward of a transformer layer takes
24bsh² + 4bs²h operations, and that of the head 2bshV (arXiv 2104.04473, appendix; micro-batch size b, sequence length
s, hidden size h, vocabulary size V). Layers are assigned to balance the work of the devices, with the head on the last
stage (:mod:`.stage_costs`). A message has 2bsh bytes.

With hosts, every candidate is simulated again for each rank order, with links, reductions and tensor-parallel
all-reduces (:mod:`.step_time`). Not modeled: without hosts, these; in both cases, the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ScheduleError
from ..parallel.crossing import rank_orders
from ..parallel.layout import ParallelLayout
from ..parallel.network import Network
from ..parallel.rank_order import RankOrder
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.reductions import eager_reductions
from ..pipe_schedules.simulation import simulate
from ..recipes.models.config import TransformerConfig
from ..recipes.models.field_flags import keys_of
from .memory import TrainingSizes
from .search import Candidate, Candidates, Request, choose
from .stage_costs import message_bytes
from .step_time import StepTime, step_times, with_tensor_parallel
from .text import join_reasons, join_words
from .traffic import traffic

MOST_TENSOR_PARALLEL = 8
TRAINED = ("none", "full")  # kinds of recomputation that `plan` considers
_MARGIN = 0.01  # schedules that save less are not evaluated
_SIMULATED = 4  # candidates of the same sizes that are simulated on hosts
_SEARCHED = 100  # distance within which an error looks for sizes that fit


@dataclass(frozen=True)
class Cluster:
    """Devices and batch size of a job.

    Args:
        devices: number of devices.
        memory_bytes: memory of a device.
        batch: samples per step, over all devices.
        flops: operations per second of a device in training, which is less than its peak.
        bandwidth: bytes per second of a message between two devices.
        tensor_parallel: the only tensor-parallel size to consider; None: all up to 8.
        network: hosts and links; replaces ``bandwidth``.

    Raises:
        ScheduleError: a value is not positive, or the hosts do not have one slot per device.
    """

    devices: int
    memory_bytes: int
    batch: int
    flops: float = 150e12
    bandwidth: float = 25e9
    tensor_parallel: int | None = None
    network: Network | None = None

    def __post_init__(self) -> None:
        if self.network is not None and self.network.hosts.world_size != self.devices:
            hosts = self.network.hosts
            raise ScheduleError(
                f"--hosts: must have one slot per device (got {hosts}, {hosts.world_size} slots, and {self.devices} "
                f"devices). Use --devices {hosts.world_size}, or other hosts."
            )
        for name in ("devices", "memory_bytes", "batch", "flops", "bandwidth", "tensor_parallel"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ScheduleError(f"{name}: must be greater than 0 (got {value}).")


@dataclass(frozen=True)
class ParallelSizes:
    """TP x PP x DP, with the ranked schedules for them.

    Attributes:
        micro_batches: N, micro-batches per pipeline group and step.
        forward_s: time of a forward of 1/D of the model in seconds, the unit of the candidates' times.
        rank_order: order with the shortest step; None without hosts.
        step: parts of the step of the best candidate; None without hosts, or if nothing fits.
    """

    tensor: int
    pipeline: int
    data: int
    micro_batches: int
    forward_s: float
    candidates: Candidates
    rank_order: RankOrder | None = None
    step: StepTime | None = None

    @property
    def candidate(self) -> Candidate | None:
        """Best candidate, or the smallest if none fits; None if no schedule is possible."""
        return self.candidates.best or self.candidates.smallest

    @property
    def fits(self) -> bool:
        """True if a schedule fits in memory."""
        return self.candidates.best is not None

    @property
    def step_s(self) -> float | None:
        """Step time in seconds."""
        time = None if self.candidate is None else self.candidate.time
        return None if time is None else time * self.forward_s

    def __str__(self) -> str:
        return f"TP {self.tensor} x PP {self.pipeline} x DP {self.data}"

    def section(self, sizes: TrainingSizes) -> dict[str, Any]:
        """Return the ``"ds_ext"`` section of the job. Raises ScheduleError if no schedule is possible."""
        candidate = self.candidate
        if candidate is None:
            raise ScheduleError(self.candidates.reason())
        train = {**keys_of(TransformerConfig, sizes), "recompute_granularity": candidate.recompute}
        del train["vocab_size"]  # that of the data
        if candidate.layers is not None and len(set(candidate.layers)) > 1:
            train["stage_layers"] = ",".join(map(str, candidate.layers))
        return {
            "schedule": candidate.schedule,
            "pipeline_parallel_size": self.pipeline,
            "tensor_parallel_size": self.tensor,
            **({} if self.rank_order is None else {"rank_order": str(self.rank_order)}),
            "schedule_options": candidate.settings,
            "train": train,
        }


@dataclass(frozen=True)
class ClusterPlan:
    """All possible sizes, best first, and (sizes, reason) of the impossible ones."""

    ranked: tuple[ParallelSizes, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def best(self) -> ParallelSizes:
        """Sizes with the shortest step that fits; the smallest if none fits."""
        return self.ranked[0]


def plan_cluster(
    cluster: Cluster,
    sizes: TrainingSizes,
    ratios: Costs | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ClusterPlan:
    """Choose a schedule for every TP x PP x DP that uses all devices.

    A schedule that saves less than 1 % compared with another one for the same sizes is not evaluated.

    Args:
        sizes: the model and its micro-batch size; its parallel sizes are ignored.
        ratios: times of backward_input and backward_weight relative to the forward, and jitter.
        progress: called with (done, total) before each of the sizes.

    Raises:
        ScheduleError: no sizes fit the devices, heads, layers and batch; or ``ratios`` contain message times.
    """
    ratios = ratios or Costs()
    if ratios.comm or ratios.links or ratios.stages is not None or not ratios.forward:
        raise ScheduleError(
            "costs: `plan` takes f, b, w and jitter only, with f above 0, because it computes the times of messages "
            "and stages itself. Remove the other keys."
        )
    try:
        factors = list(_factors(cluster))
    except _Undivided as error:
        raise ScheduleError(f"{error}{_suggestions(cluster, sizes)}") from None
    ranked: list[ParallelSizes] = []
    refused: list[tuple[str, str]] = []
    for done, (tensor, pipeline, data) in enumerate(factors):
        progress(done, len(factors))
        reason = _refusal(cluster, sizes, tensor, pipeline, data)
        if reason:
            refused.append((f"TP {tensor} PP {pipeline} DP {data}", reason))
        else:
            ranked.append(_price(cluster, sizes, ratios, tensor, pipeline, data))
    if not ranked:
        reasons = "; ".join(join_reasons(reason for _, reason in refused))
        raise ScheduleError(
            f"devices: no parallel sizes fit: {reasons} (got {cluster.devices}).{_suggestions(cluster, sizes)}"
        )
    return ClusterPlan(tuple(sorted(ranked, key=_sort_key)), tuple(refused))


def unit_costs(cluster: Cluster, sizes: TrainingSizes, ratios: Costs, pipeline: int) -> tuple[Costs, float]:
    """Return costs in units of the forward of 1/D of the model, and this unit in seconds."""
    forward_s = sizes.micro_batch * sizes.forward_flops / pipeline / (sizes.tensor_parallel * cluster.flops)
    costs = replace(
        ratios,
        forward=1.0,
        backward_input=ratios.backward_input / ratios.forward,
        backward_weight=ratios.backward_weight / ratios.forward,
        # Rounded so that the job's JSON can contain the exact value.
        comm=round(message_bytes(sizes) / cluster.bandwidth / forward_s, 6),
    )
    return costs, forward_s


def _price(
    cluster: Cluster, sizes: TrainingSizes, ratios: Costs, tensor: int, pipeline: int, data: int
) -> ParallelSizes:
    sizes = replace(sizes, tensor_parallel=tensor, data_parallel=data)
    costs, forward_s = unit_costs(cluster, sizes, ratios, pipeline)
    if cluster.network is not None:
        costs = replace(costs, comm=0.0)
    micro_batches = cluster.batch // (data * sizes.micro_batch)
    request = Request(
        pipeline, micro_batches, costs, sizes, cluster.memory_bytes, TRAINED, cheap_ops=0, margin=_MARGIN
    )
    parallel = ParallelSizes(tensor, pipeline, data, micro_batches, forward_s, choose(request))
    return parallel if cluster.network is None else _price_on_hosts(parallel, cluster.network, sizes)


def _price_on_hosts(parallel: ParallelSizes, network: Network, sizes: TrainingSizes) -> ParallelSizes:
    """Return the sizes with the candidates' times on the hosts, each with its best rank order."""
    usable, refused = parallel.candidates.usable, [c for c in parallel.candidates.ranked if c.refusal]
    priced: list[tuple[float, int, Candidate, RankOrder, StepTime]] = []
    for index, candidate in enumerate(usable[:_SIMULATED]):
        step, order = _best_order(parallel, candidate, network, sizes)
        units = step.step_s / parallel.forward_s
        on_hosts = replace(candidate, time=units, bubble=step.simulation.bubble)
        priced.append((units, index, on_hosts, order, step))
    if not priced:
        return parallel
    priced.sort(key=lambda row: row[:2])
    _, _, _, order, step = priced[0]
    skipped = [replace(c, refusal="Not simulated on the hosts.", unpriced=True) for c in usable[_SIMULATED:]]
    ranked = (*(row[2] for row in priced), *refused, *skipped)
    candidates = replace(parallel.candidates, ranked=ranked)
    return replace(parallel, candidates=candidates, rank_order=order, step=step)


def _best_order(
    parallel: ParallelSizes, candidate: Candidate, network: Network, sizes: TrainingSizes
) -> tuple[StepTime, RankOrder]:
    """Return the shortest step over all rank orders, and its order."""
    timetable = candidate.timetable
    assert timetable is not None, "usable candidates are simulated"
    placement = timetable.placement
    sizes = replace(sizes, stage_layers=candidate.layers, recompute=candidate.recompute)
    layout = ParallelLayout(placement, parallel.tensor, parallel.data)
    costs = with_tensor_parallel(candidate.costs, sizes, network, parallel.pipeline, parallel.forward_s)
    reductions = eager_reductions(simulate(timetable, candidate.costs))
    volumes = traffic(sizes, placement, timetable.micro_batches)
    orders = rank_orders(layout)
    layouts = [replace(layout, rank_order=order) for order in orders]
    steps = step_times(timetable, costs, layouts, network, volumes, parallel.forward_s, reductions)
    # Sums of the same times in a different order differ by rounding.
    best = min(range(len(steps)), key=lambda index: (float(f"{steps[index].step_s:.7g}"), index))
    return steps[best], orders[best]


def _sort_key(sizes: ParallelSizes) -> tuple[float, ...]:
    """Return the sort key: by time, then bytes; then sizes that do not fit, by bytes; then sizes without a schedule."""
    if sizes.candidate is None:
        return (2,)
    need = sizes.candidate.memory_bytes or 0
    # Sums of the same times in a different order differ by rounding.
    return (0, float(f"{sizes.step_s:.7g}"), need) if sizes.fits else (1, need)


class _Undivided(ScheduleError):
    """The requested tensor-parallel size does not divide the devices."""


def _factors(cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """Yield every (TP, PP, DP) whose product is the number of devices."""
    only_size = cluster.tensor_parallel
    for tensor in range(1, MOST_TENSOR_PARALLEL + 1) if only_size is None else [only_size]:
        groups, idle = divmod(cluster.devices, tensor)
        if idle and only_size is not None:
            raise _Undivided(f"tensor_parallel: must divide {cluster.devices} devices (got {only_size}).")
        for pipeline in range(1, groups + 1):
            if not idle and groups % pipeline == 0:
                yield tensor, pipeline, groups // pipeline


def _refusal(cluster: Cluster, sizes: TrainingSizes, tensor: int, pipeline: int, data: int) -> str:
    """Return why the sizes do not fit the model and the batch; "" if they do."""
    assert sizes.stage_layers is None, "layers per stage would fix the number of stages"
    if sizes.num_attention_heads % tensor:
        return f"{sizes.num_attention_heads} heads are not divisible by TP {tensor}"
    if sizes.ffn_size % tensor:
        return f"{sizes.ffn_size} channels of the MLP are not divisible by TP {tensor}"
    if not sizes.shares_groups(tensor):
        return f"{sizes.query_groups} query groups are not divisible by TP {tensor}"
    if sizes.num_layers < pipeline:
        return f"{sizes.num_layers} layers are fewer than PP {pipeline}"
    if cluster.batch % (data * sizes.micro_batch):
        return (
            f"{cluster.batch} samples in micro-batches of {sizes.micro_batch} are not divisible by DP {data}"
        )
    return ""


def _suggestions(cluster: Cluster, sizes: TrainingSizes) -> str:
    """Return flags with the nearest values that fit, each with all other flags unchanged; "" without candidates."""

    def fits(**changed: int) -> bool:
        variant = replace(cluster, **changed)
        try:
            return any(not _refusal(variant, sizes, *factors) for factors in _factors(variant))
        except _Undivided:
            return False

    def near(name: str) -> list[int]:
        value = getattr(cluster, name)
        below, above = range(value - 1, max(value - _SEARCHED, 0), -1), range(value + 1, value + _SEARCHED)
        nearest = (next((n for n in numbers if fits(**{name: n})), None) for numbers in (below, above))
        return [n for n in nearest if n is not None]

    values = {"--devices": near("devices"), "--global-batch-size": near("batch")}
    if cluster.tensor_parallel is not None:
        most = max(MOST_TENSOR_PARALLEL, cluster.tensor_parallel)
        values = {"--tensor-parallel": [n for n in range(1, most + 1) if fits(tensor_parallel=n)], **values}
    texts = [f"{flag} {join_words(numbers)}" for flag, numbers in values.items() if numbers]
    return f" Use {', or '.join(texts)}." if texts else ""
