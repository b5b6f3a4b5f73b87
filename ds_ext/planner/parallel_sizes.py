"""Tensor-, pipeline- and data-parallel sizes of a job for a cluster, each with its best schedule.

A device computes at a given rate. The forward of a transformer layer takes 24bsh² + 4bs²h operations, and that of the
head 2bshV (arXiv 2104.04473, appendix; micro-batch size b, sequence length s, hidden size h, vocabulary size V). Layers
are assigned to balance the work of the devices, with the head on the last stage (:mod:`.stage_costs`).

Every candidate is simulated for each rank order, with links, reductions and tensor-parallel all-reduces
(:mod:`.step_time`). Without hosts, the devices are on hosts of 8. Not modeled: the optimizer step, and the higher
efficiency of larger micro-batches. Therefore the largest micro-batch wins among those that take as long. Slices of a
sequence have the cost of shorter kernels (:func:`.stage_costs.slice_slowdown`).

With tensor parallelism, sequence parallelism keeps less and sends smaller messages between stages, and its collectives
send as many bytes. So sizes that allow it are not planned without it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from ..errors import ScheduleError
from ..model.config import TRAINED_FIELDS, WEIGHT_FIELDS, TransformerConfig
from ..model.field_flags import keys_of
from ..parallel.hosts import Hosts
from ..parallel.network import Link, Network
from ..pipe_schedules.costs import Costs
from .candidates import Candidate, Candidates
from .request import Request
from .search import choose_each, price
from .stage_costs import slice_slowdown
from .text import join_reasons, join_words
from .training_sizes import TrainingSizes

MOST_TENSOR_PARALLEL = 8
TRAINED = ("none", "full")  # kinds of recomputation that `plan` considers
INSIDE, BETWEEN = Link(300e9, 2e-6), Link(25e9, 10e-6)  # links inside a host and between hosts by default
_INTERVALS = (1, 2, 3, 4)  # of full recomputation
_SLICES, _LEAST_SLICE = (2, 4, 8), 2048  # numbers of slices by default, and tokens of the shortest
_MOST_SLICES = 64  # in an error
_DIVIDED = {  # in reasons
    "num_attention_heads": "heads",
    "ffn_hidden_size": "channels of the MLP",
    "shared_width": "channels of shared experts",
}
_MARGIN = 0.01  # schedules that save less are not evaluated
_TRIED, _MOST_OPS = 3, 10_000  # sizes with their head in parts, and forwards of a step for more than one
RANKS_PER_HOST = 8
_SEARCHED = 100  # distance within which an error looks for sizes that fit


@dataclass(frozen=True)
class Cluster:
    """Devices and batch size of a job.

    Args:
        batch: samples per step, over all devices.
        flops: operations per second of a device in training, which is less than its peak.
        tensor_parallel: the only tensor-parallel size to consider; None: all up to 8.
        pipeline_parallel: likewise the pipeline-parallel size; None: all.
        network: hosts and links; None: hosts of 8 devices with default links.
        micro_batch: the only micro-batch size to consider; None: all powers of two.
        interval: the only interval of full recomputation to consider; None: 1 to 4.
        sequence_parallel: use sequence parallelism; None: with tensor parallelism, if it divides the tokens.
        slices: the only numbers of slices of the sequence to consider in a pipeline; None: see :meth:`slice_numbers`.
        head_parts: every device of a pipeline computes a part of the head.
    """

    devices: int
    memory_bytes: int
    batch: int
    flops: float = 150e12
    tensor_parallel: int | None = None
    network: Network | None = None
    micro_batch: int | None = None
    interval: int | None = None
    sequence_parallel: bool | None = None
    slices: tuple[int, ...] | None = None
    head_parts: bool = False
    pipeline_parallel: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "devices",
            "memory_bytes",
            "batch",
            "flops",
            "tensor_parallel",
            "pipeline_parallel",
            "micro_batch",
            "interval",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ScheduleError(f"{name}: must be greater than 0 (got {value}).")
        if self.network is not None and self.network.hosts.world_size != self.devices:
            hosts = self.network.hosts  # those of --hosts, as default_hosts() fit
            raise ScheduleError(
                f"--hosts: must have one slot per device (got {hosts}, {hosts.world_size} slots, and {self.devices} "
                f"devices). Use --devices {hosts.world_size}, or other hosts."
            )

    @property
    def links(self) -> Network:
        return self.network or Network(default_hosts(self.devices), INSIDE, BETWEEN)

    def resized(self, devices: int, memory_bytes: int, flops: float) -> Cluster:
        """Return a cluster with other devices, on hosts of 8 with the same links."""
        network = replace(self.links, hosts=default_hosts(devices))
        return replace(self, devices=devices, memory_bytes=memory_bytes, flops=flops, network=network)

    def slice_numbers(self, tokens: int, pipeline: int) -> tuple[int, ...]:
        """Return the numbers of slices of a sample to consider for PP: by default slices of 2,048 tokens or more."""
        if pipeline == 1:
            return (1,)
        fitting = (k for k in _SLICES if tokens % k == 0 and tokens // k >= _LEAST_SLICE)
        return (1, *fitting) if self.slices is None else self.slices

    def micro_batches(self, data: int) -> Iterator[tuple[int, int]]:
        """Yield every (micro-batch size, N) to consider for DP pipeline groups."""
        size, samples = self.micro_batch or 1, self.batch // data
        while samples % size == 0:
            yield size, samples // size
            size *= 2
            if self.micro_batch is not None:
                return


def default_hosts(devices: int) -> Hosts:
    full, rest = divmod(devices, RANKS_PER_HOST)
    return Hosts((RANKS_PER_HOST,) * full + (rest,) * bool(rest))


@dataclass(frozen=True)
class ParallelSizes:
    """TP x PP x DP, with the ranked schedules for them."""

    tensor: int
    pipeline: int
    data: int
    candidates: Candidates

    @property
    def candidate(self) -> Candidate | None:
        """Best candidate, or the smallest if none fits; None if no schedule is possible, or not all are evaluated."""
        smallest = None if self.least_s < math.inf else self.candidates.smallest
        if smallest is not None and (
            smallest.unpriced or smallest.memory_order > (self.candidates.least_bytes,)
        ):
            smallest = None
        return self.candidates.best or smallest

    @property
    def fits(self) -> bool:
        return self.candidates.best is not None

    @property
    def step_s(self) -> float | None:
        return None if self.candidate is None else self.candidate.time

    @property
    def least_s(self) -> float:
        """Lower bound on the step time of what is not evaluated, in seconds; infinite if all is."""
        return self.candidates.least

    def __str__(self) -> str:
        return f"TP {self.tensor} x PP {self.pipeline} x DP {self.data}"

    def section(self) -> dict[str, Any]:
        """Return the ``"ds_ext"`` section of the job."""
        candidate = self.candidate
        if candidate is None or candidate.sizes is None:
            raise ScheduleError(self.candidates.reason())
        sizes, layers, lengths = candidate.sizes, candidate.layers, candidate.slice_lengths
        # The vocabulary is that of the data; layers of transformers are those of a folder.
        fixed = (*WEIGHT_FIELDS, *TRAINED_FIELDS) if sizes.is_of_folder else ("vocab_size",)
        train = keys_of(TransformerConfig, sizes)
        for key in keys_of(TransformerConfig, sizes, fixed):
            train.pop(key, None)
        train["recompute_granularity"] = candidate.recompute
        if layers is not None and len(set(layers)) > 1:
            train["stage_layers"] = ",".join(map(str, layers))
        return {
            "schedule": candidate.schedule,
            "pipeline_parallel_size": self.pipeline,
            "tensor_parallel_size": self.tensor,
            **({"sequence_parallel": True} if sizes.sequence_parallel else {}),
            **({"sequence_slices": candidate.slices} if candidate.slices > 1 else {}),
            **({"vocabulary_parallel_head": True} if candidate.costs.head else {}),
            **({"slice_lengths": [*lengths]} if len({*lengths}) > 1 else {}),
            **({"overlap_across_steps": True} if sizes.overlap_across_steps and sizes.bytes.sharded else {}),
            "rank_order": str(candidate.rank_order),
            "schedule_options": candidate.settings,
            "train": train,
        }


@dataclass(frozen=True)
class ClusterPlan:
    """All possible sizes, best first, and (sizes, reason) of the impossible ones.

    The best sizes are the simplest of those within 1 % of the shortest step, without tight memory if there are any.
    Others follow by time, then those that are not evaluated, by their bounds, then those that do not fit.
    """

    ranked: tuple[ParallelSizes, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def shown(self) -> tuple[ParallelSizes, ...]:
        """Sizes that fit or are not evaluated; if none fits, those that are smaller than all others."""
        if self.best.fits:
            return tuple(row for row in self.ranked if row.fits or row.least_s < math.inf)
        least = min(row.candidates.least_bytes for row in self.ranked)
        return (
            tuple(row for row in self.ranked if row.candidate and row.candidate.memory_order <= (least,))
            or self.ranked[:1]
        )

    @property
    def best(self) -> ParallelSizes:
        """Sizes to use; the smallest if none fits."""
        return self.ranked[0]

    @property
    def second(self) -> ParallelSizes | None:
        """Next sizes; None if no others fit, or if sizes that are not evaluated may take less time."""
        least_s = min(row.least_s for row in self.ranked)
        row = next((row for row in self.ranked[1:] if row.fits), None)
        return row if row is not None and (row.step_s or 0.0) * (1 - _MARGIN) <= least_s else None


def plan_cluster(
    cluster: Cluster,
    sizes: TrainingSizes,
    ratios: Costs | None = None,
    progress: Callable[[int, int, int], None] = lambda devices, done, total: None,
    most_s: float = math.inf,
) -> ClusterPlan:
    """Choose a schedule for every TP x PP x DP that uses all devices.

    A schedule that saves less than 1 % compared with another one for the same sizes is not evaluated, nor are sizes
    that take longer than the second best ones.

    Args:
        sizes: the model; its parallel sizes and its micro-batch size are ignored.
        ratios: times of backward_input and backward_weight relative to the forward, and jitter.
        progress: called with the number of devices, and of sizes that are decided, and of all.
        most_s: longest step of interest; sizes whose bound is above it are not evaluated.
    """
    ratios = ratios or Costs()
    if (
        ratios.comm
        or ratios.links
        or ratios.stages is not None
        or ratios.slices is not None
        or ratios.head
        or not ratios.forward
    ):
        raise ScheduleError(
            "costs: `plan` takes f, b, w and jitter only, with f above 0, because it computes the times of messages "
            "and stages itself. Remove the other keys."
        )
    if odd := [k for k in cluster.slices or () if k < 1 or sizes.seq_length % k]:
        fitting = join_words(k for k in range(1, _MOST_SLICES + 1) if sizes.seq_length % k == 0)
        raise ScheduleError(
            f"--sequence-slices: must divide {sizes.seq_length} tokens (got {odd[0]}). Use {fitting}."
        )
    try:
        factors = list(_factors(cluster))
    except _Undivided as error:
        raise ScheduleError(f"{error}{_suggestions(cluster, sizes)}") from None
    possible: list[tuple[int, int, int]] = []
    refused: list[tuple[str, str]] = []
    for tensor, pipeline, data in factors:
        reason = _refusal(cluster, sizes, tensor, pipeline, data)
        if reason:
            refused.append((f"TP {tensor} PP {pipeline} DP {data}", reason))
        else:
            possible.append((tensor, pipeline, data))
    if not possible:
        reasons = "; ".join(join_reasons(reason for _, reason in refused))
        raise ScheduleError(
            f"devices: no parallel sizes fit: {reasons} (got {cluster.devices}).{_suggestions(cluster, sizes)}"
        )
    possible.sort(key=lambda factors: (factors[1], factors[0]))
    requests = [list(_requests(cluster, sizes, ratios, *factors)) for factors in possible]
    candidates = choose_each(requests, partial(progress, cluster.devices), most_s)
    ranked = [ParallelSizes(*factors, choices) for factors, choices in zip(possible, candidates, strict=True)]
    shortest = min((c.time or 0.0 for row in ranked for c in row.candidates.usable), default=0.0)
    near = (row for row in ranked if row.fits and (row.step_s or 0.0) <= shortest * (1 + _MARGIN))
    best = min(near, key=lambda row: row.candidate is not None and row.candidate.tight, default=None)
    return ClusterPlan(
        tuple(sorted(ranked, key=lambda row: (row is not best, _sort_key(row)))), tuple(refused)
    )


def other_head(cluster: Cluster, sizes: TrainingSizes, ratios: Costs, plan: ClusterPlan) -> Candidate | None:
    """Return a candidate with its head in parts, or, of a cluster with head parts, on the last stage.

    It is the shortest one for the first sizes of ``plan``; None: none fits. Arguments as for :func:`plan_cluster`.
    """
    others: list[Candidate] = []
    for row in [row for row in plan.ranked if row.pipeline > 1][:_TRIED]:
        candidate = row.candidates.best
        if candidate is None or candidate.sizes is None:
            continue
        if others and candidate.micro_batches * candidate.stages > _MOST_OPS:
            break
        other = replace(
            cluster,
            head_parts=not cluster.head_parts,
            micro_batch=candidate.sizes.micro_batch,
            sequence_parallel=candidate.sizes.sequence_parallel,
            slices=(candidate.slices,),
        )
        with contextlib.suppress(ScheduleError):
            (request,) = _requests(other, sizes, ratios, row.tensor, row.pipeline, row.data)
            others.append(price(request, candidate))
    return min((c for c in others if not c.refusal), key=lambda c: c.time or math.inf, default=None)


def unit_costs(cluster: Cluster, sizes: TrainingSizes, ratios: Costs, pipeline: int) -> tuple[Costs, float]:
    """Return costs in units of the forward of 1/D of the model, and this unit in seconds."""
    forward_s = sizes.micro_batch * sizes.rank_flops / pipeline / cluster.flops
    costs = replace(
        ratios,
        forward=1.0,
        backward_input=ratios.backward_input / ratios.forward,
        backward_weight=ratios.backward_weight / ratios.forward,
    )
    return costs, forward_s


def _requests(
    cluster: Cluster, sizes: TrainingSizes, ratios: Costs, tensor: int, pipeline: int, data: int
) -> Iterator[Request]:
    """Yield a request for every micro-batch size, the largest first, with and without sequence parallelism.

    Only the smallest micro-batches are sliced, because smaller ones cost less than slices of larger ones.
    """
    head_parts = cluster.head_parts and pipeline > 1
    if head_parts:  # each works like a chunked loss, with and without the option
        sizes = replace(sizes, chunked_loss=False)
    numbers = cluster.slice_numbers(sizes.seq_length, pipeline)
    smallest, *larger = cluster.micro_batches(data)
    batches = [*product(reversed(larger), {1} & {*numbers}), *product([smallest], numbers)]
    for ((micro_batch, micro_batches), slices), sequence_parallel in product(batches, (True, False)):
        possible = _shares_tokens(sizes, tensor, slices)
        wanted = cluster.sequence_parallel if tensor > 1 else False
        if (sequence_parallel and not possible) or wanted not in (None, sequence_parallel):
            continue
        split = replace(
            sizes,
            micro_batch=micro_batch,
            tensor_parallel=tensor,
            data_parallel=data,
            sequence_parallel=sequence_parallel,
        )
        costs, forward_s = unit_costs(cluster, split, ratios, pipeline)
        yield Request(
            pipeline,
            micro_batches,
            costs,
            split,
            cluster.memory_bytes,
            TRAINED,
            cheap_ops=0,
            margin=_MARGIN,
            intervals=_INTERVALS if cluster.interval is None else (cluster.interval,),
            network=cluster.links,
            unit_s=forward_s * slice_slowdown(split, slices),
            unsharded_alone=True,
            slices=slices,
            head_parts=head_parts,
        )


def _shares_tokens(sizes: TrainingSizes, tensor: int, slices: int) -> bool:
    """Return whether sequence parallelism is possible."""
    return tensor > 1 and sizes.experts is None and sizes.seq_length % (tensor * slices) == 0


def _sort_key(sizes: ParallelSizes) -> tuple[float, ...]:
    """Return the sort key: by time, then bytes; by bound; then sizes that do not fit, by bytes."""
    need = 0 if sizes.candidate is None else sizes.candidate.memory_bytes or 0
    if sizes.fits:
        # Sums of the same times in a different order differ by rounding.
        return (0, float(f"{sizes.step_s:.7g}"), need)
    if sizes.least_s < math.inf:
        return (1, sizes.least_s)
    return (3,) if sizes.candidate is None else (2, need)


class _Undivided(ScheduleError):
    """The requested parallel sizes do not divide the devices."""


def _factors(cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """Yield every (TP, PP, DP) whose product is the number of devices. Raises _Undivided for requested sizes."""
    only_size, only_pipeline = cluster.tensor_parallel, cluster.pipeline_parallel
    sizes = 0
    for tensor in range(1, MOST_TENSOR_PARALLEL + 1) if only_size is None else [only_size]:
        groups, idle = divmod(cluster.devices, tensor)
        if idle and only_size is not None:
            raise _Undivided(f"tensor_parallel: must divide {cluster.devices} devices (got {only_size}).")
        for pipeline in range(1, groups + 1):
            if not idle and groups % pipeline == 0 and only_pipeline in (None, pipeline):
                sizes += 1
                yield tensor, pipeline, groups // pipeline
    if not sizes:
        tensor = "" if only_size is None else f" / TP {only_size}"
        raise _Undivided(
            f"pipeline_parallel: must divide {cluster.devices} devices{tensor} (got {only_pipeline})."
        )


def _refusal(cluster: Cluster, sizes: TrainingSizes, tensor: int, pipeline: int, data: int) -> str:
    """Return why the sizes do not fit the model and the batch; "" if they do."""
    assert sizes.stage_layers is None, "layers per stage would fix the number of stages"
    for name, size in sizes.divided_sizes:
        if size % tensor:
            return f"{size} {_DIVIDED.get(name, name)} are not divisible by TP {tensor}"
    if not sizes.shares_groups(tensor):
        return f"{sizes.query_groups} query groups are not divisible by TP {tensor}"
    least = min(cluster.slice_numbers(sizes.seq_length, pipeline))
    if cluster.sequence_parallel and tensor > 1 and sizes.experts is not None:
        return f"experts compute the tokens of all TP {tensor} ranks, without --sequence-parallel"
    if cluster.sequence_parallel and tensor > 1 and not _shares_tokens(sizes, tensor, least):
        return f"{sizes.seq_length // least} tokens are not divisible by TP {tensor}"
    if sizes.num_layers < pipeline:
        return f"{sizes.num_layers} layers are fewer than PP {pipeline}"
    micro_batch = cluster.micro_batch or 1
    if cluster.batch % (data * micro_batch):
        return f"{cluster.batch} samples in micro-batches of {micro_batch} are not divisible by DP {data}"
    return ""


def _suggestions(cluster: Cluster, sizes: TrainingSizes) -> str:
    """Return flags with the nearest values that fit, each with all other flags unchanged; "" without candidates."""

    def fits(**changed: int) -> bool:
        variant = replace(cluster, network=None, **changed)
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
    if cluster.micro_batch is not None:
        values = {"--micro-batch-size": near("micro_batch"), **values}
    if cluster.tensor_parallel is not None:
        most = max(MOST_TENSOR_PARALLEL, cluster.tensor_parallel)
        values = {"--tensor-parallel": [n for n in range(1, most + 1) if fits(tensor_parallel=n)], **values}
    if cluster.pipeline_parallel is not None:
        values = {"--pipeline-parallel": near("pipeline_parallel"), **values}
    texts = [f"{flag} {join_words(numbers)}" for flag, numbers in values.items() if numbers]
    return f" Use {', or '.join(texts)}." if texts else ""
