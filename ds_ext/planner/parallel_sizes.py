"""How to cut a cluster before it is there: every size of tensor, pipeline and data parallelism, each with its schedule.

A device computes at a given rate and messages have a given bandwidth. The forward of a transformer layer takes
24bsh² + 4bs²h operations and that of the head 2bshV (arXiv 2104.04473, appendix; b the micro-batch size, s the
sequence length, h the hidden size, V the vocabulary). Layers are cut so that the work of the devices is as even as it
can be, the head being all on the last stage (:mod:`.stage_costs`). A message is 2bsh bytes.

Not priced: tensor-parallel communication, gradient reduction over data-parallel ranks, the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ScheduleError
from ..pipe_schedules.costs import Costs
from .candidates import Candidate, Choice
from .memory import ModelSizes
from .search import Request, choose

_MARGIN = 0.01  # a schedule that saves less is not looked for
MOST_TENSOR_PARALLEL = 8
_NEAR = 100  # numbers on either side that an error looks through for one that would do
TRAINED = ("none", "full")  # the kinds of recomputation that the scripts have


@dataclass(frozen=True)
class Cluster:
    """What the job runs on and how much it is to do.

    Args:
        devices: all of them.
        memory_bytes: of a device.
        flops: operations a second of a device, as reached in training and not as on its data sheet.
        bandwidth: bytes a second of a message between two devices.
        batch: samples of a step, all devices together.
        tensor_parallel: the only size to look at; None: all up to 8.

    Raises:
        ScheduleError: one is not positive.
    """

    devices: int
    memory_bytes: int
    batch: int
    flops: float = 150e12
    bandwidth: float = 25e9
    tensor_parallel: int | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "memory_bytes", "batch", "flops", "bandwidth", "tensor_parallel"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ScheduleError(f"plan: {name.replace('_', ' ')} must be more than 0; got {value}.")


@dataclass(frozen=True)
class Cut:
    """One way to cut the cluster: TP, PP, DP, the micro-batches of a pipeline group, and the choice of a schedule.

    ``forward_s`` is the time of a forward of one D-th of the model, the unit of the choice's times.
    """

    tensor: int
    pipeline: int
    data: int
    micro_batches: int
    forward_s: float
    choice: Choice

    @property
    def row(self) -> Candidate | None:
        """The best schedule; where nothing fits the nearest; None when none is possible."""
        return self.choice.best or self.choice.nearest

    @property
    def fits(self) -> bool:
        """Whether a schedule fits the memory."""
        return self.choice.best is not None

    @property
    def step_s(self) -> float | None:
        """Seconds of a step."""
        return None if self.row is None or self.row.time is None else self.row.time * self.forward_s


@dataclass(frozen=True)
class Cuts:
    """All that are possible, best first (least time that fits, then least memory), and why the others are not."""

    found: tuple[Cut, ...]
    refused: tuple[tuple[str, str], ...]


def parallel_sizes(
    cluster: Cluster,
    sizes: ModelSizes,
    ratios: Costs | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Cuts:
    """Choose a schedule for every TP x PP x DP that uses all devices.

    What would be less than 1 % faster than another schedule for the same sizes is not looked for.

    Args:
        sizes: of the model, with its micro-batch size; its parallel sizes do not count.
        ratios: times of input and weight gradient relative to the forward's, and jitter.
        progress: called with how many of how many sizes are done, before each.

    Raises:
        ScheduleError: nothing divides the devices, heads, layers and batch; or ``ratios`` has times of messages.
    """
    ratios = ratios or Costs()
    if ratios.comm or ratios.links or ratios.stages is not None or not ratios.forward:
        raise ScheduleError(
            "plan: costs are f, b and w relative to each other, and jitter; times of messages follow from the "
            "bandwidth, and factors of stages belong to one number of stages."
        )
    try:
        every = list(_factors(cluster))
    except _Undivided as error:
        raise ScheduleError(f"{error}{_ways_out(cluster, sizes)}") from None
    found, refused = [], []
    for done, (tensor, pipeline, data) in enumerate(every):
        progress(done, len(every))
        reason = _refusal(cluster, sizes, tensor, pipeline, data)
        if reason:
            refused.append((f"TP {tensor} PP {pipeline} DP {data}", reason))
        else:
            found.append(_cut(cluster, sizes, ratios, tensor, pipeline, data))
    if not found:
        reasons = "; ".join(join_reasons(refused))
        raise ScheduleError(
            f"plan: no way to cut {cluster.devices} devices: {reasons}.{_ways_out(cluster, sizes)}"
        )
    return Cuts(tuple(sorted(found, key=_order)), tuple(refused))


def join_reasons(refused: Sequence[tuple[str, str]]) -> list[str]:
    """Reasons that differ only in their last number as one: "32 heads do not divide by TP 3, 5"."""
    joined: dict[str, set[int]] = {}
    for _, reason in refused:
        words, _, number = reason.rpartition(" ")
        joined.setdefault(words, set()).add(int(number))
    return [f"{words} {', '.join(map(str, sorted(numbers)))}" for words, numbers in joined.items()]


def forward_flops(sizes: ModelSizes) -> float:
    """Operations of the forward of one micro-batch through the whole model, on all its ranks together."""
    b, s, h = sizes.micro_batch, sizes.seq, sizes.hidden
    layers = sizes.layers if isinstance(sizes.layers, int) else sum(sizes.layers)
    return layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * sizes.vocab


def message_bytes(sizes: ModelSizes) -> int:
    """Of an activation or gradient between two stages, in 16 bits."""
    split = sizes.tensor_parallel if sizes.sequence_parallel else 1
    return 2 * sizes.seq * sizes.micro_batch * sizes.hidden // split


def unit_costs(cluster: Cluster, sizes: ModelSizes, ratios: Costs, pipeline: int) -> tuple[Costs, float]:
    """Return costs in forward times of one P-th of the model, and that unit in seconds."""
    forward_s = forward_flops(sizes) / pipeline / (sizes.tensor_parallel * cluster.flops)
    # Rounded, so that the job's JSON can contain exactly what was planned for.
    message = round(message_bytes(sizes) / cluster.bandwidth / forward_s, 6)
    backward_input, backward_weight = (
        ratios.backward_input / ratios.forward,
        ratios.backward_weight / ratios.forward,
    )
    costs = replace(
        ratios, forward=1.0, backward_input=backward_input, backward_weight=backward_weight, comm=message
    )
    return costs, forward_s


def job_section(cut: Cut, sizes: ModelSizes) -> dict[str, Any]:
    """The ``"ds_ext"`` section that trains so. Raises ScheduleError for a cut without a schedule."""
    row = cut.row
    if row is None:
        raise ScheduleError(cut.choice.reason())
    train: dict[str, Any] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "seq_length": sizes.seq,
        "recompute_granularity": row.recompute,
    }
    if row.layers is not None and len(set(row.layers)) > 1:
        train["stage_layers"] = ",".join(map(str, row.layers))
    return {
        "schedule": row.schedule,
        "pipeline_parallel_size": cut.pipeline,
        "tensor_parallel_size": cut.tensor,
        "schedule_options": row.settings,
        "train": train,
    }


def _factors(cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """Every TP, PP, DP whose product is the devices."""
    wanted = cluster.tensor_parallel
    tensors = range(1, MOST_TENSOR_PARALLEL + 1) if wanted is None else [wanted]
    for tensor in tensors:
        left, rest = divmod(cluster.devices, tensor)
        if rest and wanted is not None:
            raise _Undivided(f"plan: tensor parallel {wanted} does not divide {cluster.devices} devices.")
        for pipeline in range(1, left + 1):
            if not rest and left % pipeline == 0:
                yield tensor, pipeline, left // pipeline


class _Undivided(ScheduleError):
    """The size of tensor parallelism that is asked for does not divide the devices."""


def _ways_out(cluster: Cluster, sizes: ModelSizes) -> str:
    """Numbers that could be cut, each in place of one that cannot, as flags; "" where none is near."""

    def fits(**changed: int) -> bool:
        other = replace(cluster, **changed)
        try:
            return any(not _refusal(other, sizes, *cut) for cut in _factors(other))
        except _Undivided:
            return False

    def near(name: str) -> list[int]:
        given = getattr(cluster, name)
        below, above = range(given - 1, max(given - _NEAR, 0), -1), range(given + 1, given + _NEAR)
        found = (next((n for n in numbers if fits(**{name: n})), None) for numbers in (below, above))
        return [n for n in found if n is not None]

    ways = {"--devices": near("devices")}
    if cluster.tensor_parallel is not None:
        most = max(MOST_TENSOR_PARALLEL, cluster.tensor_parallel)
        tensors = [n for n in range(1, most + 1) if fits(tensor_parallel=n)]
        ways = {"--tensor-parallel": tensors, **ways}
    ways["--global-batch-size"] = near("batch")
    texts = [f"{flag} {either(numbers)}" for flag, numbers in ways.items() if numbers]
    return f" Use {', or '.join(texts)}." if texts else ""


def either(numbers: Sequence[int]) -> str:
    """``"1, 2 or 4"``."""
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last}" if rest else last


def _refusal(cluster: Cluster, sizes: ModelSizes, tensor: int, pipeline: int, data: int) -> str:
    """Why the sizes do not fit each other; "" if they do."""
    assert isinstance(sizes.layers, int), "layers of every stage belong to one number of stages"
    if sizes.heads % tensor:
        return f"{sizes.heads} heads do not divide by TP {tensor}"
    if sizes.layers < pipeline:
        return f"{sizes.layers} layers are fewer than PP {pipeline}"
    if cluster.batch % (data * sizes.micro_batch):
        return f"{cluster.batch} samples in micro-batches of {sizes.micro_batch} do not divide by DP {data}"
    return ""


def _cut(cluster: Cluster, sizes: ModelSizes, ratios: Costs, tensor: int, pipeline: int, data: int) -> Cut:
    sizes = replace(sizes, tensor_parallel=tensor, data_parallel=data)
    costs, forward_s = unit_costs(cluster, sizes, ratios, pipeline)
    micro_batches = cluster.batch // (data * sizes.micro_batch)
    request = Request(
        pipeline, micro_batches, costs, sizes, cluster.memory_bytes, TRAINED, cheap_ops=0, margin=_MARGIN
    )
    return Cut(tensor, pipeline, data, micro_batches, forward_s, choose(request))


def _order(cut: Cut) -> tuple[float, ...]:
    """What fits by time, equal times by bytes; then what does not by bytes; then what has no schedule."""
    if cut.row is None:
        return (2,)
    size = cut.row.memory_bytes or 0
    # Times of the same work, summed up in another order, differ by rounding.
    return (0, float(f"{cut.step_s:.7g}"), size) if cut.fits else (1, size)
