"""Losses of a step: terms of every micro-batch, divisors of their gradients, and means over all ranks.

A loss function returns a scalar mean, and every micro-batch has the same weight. Or it returns a pair (sum, count), or
name -> pair for a loss with several terms. Then the loss and the gradient of a step are the sum of the sums divided by
the sum of the counts, over all micro-batches, pipes and data-parallel ranks: every counted label has the same weight.

A metric may look like a count. So without the method ``counts`` below, counts are compared with the labels of every
micro-batch: all counts of a step must be those of one way to count labels (:mod:`.count_check`).

The divisor of the gradients must be known before the first backward. If the loss function has a method
``counts(labels)``, the ranks of the last stage count the labels of the step and add up the counts beside the first
forwards. Otherwise, the gradients are divided by a power of two, and multiplied by a correction before the optimizer
step; fp16 gradients could underflow, so fp16 needs the method.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from ...errors import ConfigError
from ..all_ranks import on_all_ranks
from ..contracts import AdaptedLoss
from ..messages import unpack
from ..module import PipelineModule
from ..types import Batch
from .count_check import WAYS, Number, check_count, join_checks

_ONLY = ""  # name of the term of a loss with one term


@dataclass(frozen=True, slots=True)
class Term:
    """Term of the loss of a micro-batch.

    Attributes:
        sum: scalar with its graph.
        count: number of counted labels, float64; None: ``sum`` is a mean, and the micro-batch counts as one.
        check: float64 vector of the returned count, the number of labels, and 1 for each way to count labels that gives
            another number; None: the count is not checked.
    """

    sum: Tensor
    count: Tensor | None
    check: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """Mean over the counted labels of the micro-batch; 0 without any."""
        return self.sum if self.count is None else self.sum / _positive(self.count).to(self.sum.dtype)


Loss = dict[str, Term]


def mean_of(loss: Loss) -> Tensor:
    """Return the loss of one micro-batch: the sum of the means of its terms."""
    means = [term.mean for term in loss.values()]
    return torch.stack(means).sum() if len(means) > 1 else means[0]


def join_losses(losses: Sequence[Loss]) -> Loss:
    if len(losses) == 1:
        return losses[0]
    joined = {name: [loss[name] for loss in losses] for name in losses[0]}
    return {
        name: Term(
            torch.stack([term.sum.detach() for term in terms]).sum(),
            torch.stack([term.count for term in terms if term.count is not None]).sum(),
        )
        for name, terms in joined.items()
    }


def terms_of(value: Batch) -> Loss:
    return {name: _make_term(term) for name, term in _by_term(value).items()}


def require_pairs(loss: Loss) -> None:
    """Raise ConfigError for a term that is a mean: those of slices with different numbers of labels do not add up."""
    names = [name or "the loss" for name, term in loss.items() if term.count is None]
    if names:
        raise ConfigError(
            f"loss_fn: must return pairs (sum, count) with sequence_slices (got a mean for {', '.join(names)}). Return "
            f"the sum over the labels and their number."
        )


@dataclass(frozen=True)
class StepMeans:
    """Losses of a step or an evaluation over all micro-batches and ranks.

    Attributes:
        loss: mean loss, fp32.
        by_name: name -> mean of a term or an additional loss; None without any.
        tokens: counted labels of the first term; None if the loss function returns means.
        correction: factor for the gradients; 0: no label was counted, so the step must not change weights.
    """

    loss: Tensor
    by_name: dict[str, Tensor] | None
    tokens: int | None
    correction: float


class _TermNumbers(NamedTuple):
    """Numbers of a term or an additional loss that ranks gather: of one rank, or a tuple of those of all ranks each."""

    total: Any
    counted: Any
    divisor: Any
    returned: Any  # this field and the next ones: :func:`join_checks`
    labels: Any
    differing_ways: Any


class LocalLosses:
    """Losses of this rank in a step. All ranks must construct it together."""

    def __init__(self, module: PipelineModule, device: torch.device) -> None:
        self._module, self._device = module, device
        self._group = module.mpu().get_data_parallel_group()
        self._data_parallel_size = dist.get_world_size(self._group)
        # One rank of a tensor-parallel group reports the losses.
        self._counts_here = module.layout.coordinates(dist.get_rank())[2] == 0
        self._by_micro_batch = module.plan.settings.loss_weighting == "micro_batches"
        self._in_fp16 = any(on_all_ranks(lambda: any(p.dtype == torch.float16 for p in module.parameters())))
        self._trains = True
        # Name of a term -> (sum, count) of every micro-batch, and total count that its gradients were divided by.
        self._terms: dict[str, list[tuple[Number, Number]]] = {}
        self._divisors: dict[str, Tensor] = {}
        self._checks: dict[str, list[Tensor]] = {}  # :attr:`Term.check` of every micro-batch
        self._weight = 0.0  # of the micro-batches of this step whose loss this rank has computed
        # Name -> "mean", "count" or "additional": on this rank in this step; and agreed by all ranks in the first step
        # and in the first evaluation, by whether it trains.
        self._local_kinds: dict[str, str] = {}
        self._kinds: dict[bool, dict[str, str]] = {}
        self._declared_counts: _Reduced | None = None  # from the method ``counts``
        self._loss = AdaptedLoss(module.loss_fn)  # read again in every step: a script may replace it

    def start_step(self, trains: bool, read_labels: Callable[[], Iterable[Batch]]) -> None:
        """Start a step or an evaluation, and count the labels of a step if the loss function can.

        ``read_labels`` returns those of this rank's micro-batches, as the loss function gets them; it is called only to
        count. In a training step, all data-parallel ranks of the last stage must pass theirs.
        """
        self._trains = trains
        self._weight = 0.0
        self._declared_counts = None
        self._terms.clear()
        self._divisors.clear()
        self._checks.clear()
        self._local_kinds.clear()
        self._loss = AdaptedLoss(self._module.loss_fn)
        count_labels = self._loss.counts
        if self._by_micro_batch or count_labels is None:
            return
        counts = [_by_term(count_labels(labels)) for labels in read_labels()]
        if counts:
            totals = {name: sum(float(by_term[name]) for by_term in counts) for name in counts[0]}
            group = self._group if self._data_parallel_size > 1 else None
            self._declared_counts = _Reduced(totals, group, self._device)

    def shift_labels(self, labels: Batch) -> Batch:
        if self._loss.shift_labels is None:
            return labels
        # Copies, because every slice is cut from the labels, and the method may change them in place.
        labels = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, labels)
        return self._loss.shift_labels(tuple(labels) if isinstance(labels, list) else labels)

    def return_logits(self, outputs: Batch) -> Batch:
        return outputs if self._loss.return_logits is None else self._loss.return_logits(outputs)

    def compute(self, outputs: Batch, labels: tuple[Tensor, ...] | None) -> Loss:
        """Return the loss of a micro-batch. Without a loss function the outputs are the loss, as in DeepSpeed."""
        loss_fn = self._loss.function
        value = outputs if loss_fn is None else loss_fn(outputs, None if labels is None else unpack(labels))
        loss = terms_of(value)
        if self._loss.counts is None:
            masks = outputs[1:] if isinstance(outputs, tuple | list) else ()
            loss = {name: _checked(term, (*labels, *masks) if labels else ()) for name, term in loss.items()}
        if self._by_micro_batch:
            return {name: Term(term.mean, None, term.check) for name, term in loss.items()}
        self._require_counts(loss)
        return loss

    def _require_counts(self, loss: Loss) -> None:
        if self._loss.counts is not None:
            return
        names_of_pairs = [name for name, term in loss.items() if term.count is not None]
        if len(names_of_pairs) > 1:
            raise _several_terms_error(names_of_pairs)
        if names_of_pairs and self._in_fp16 and self._trains:
            raise ConfigError(
                "loss_fn: a pair (sum, count) needs a method counts(labels) with fp16, whose gradients could "
                "underflow without it (got none). Add the method, or train in bf16."
            )

    def backward_root(self, loss: Loss, micro_batches: int) -> Tensor:
        """Return the scalar from which the backward of a micro-batch starts: the terms divided by their counts.

        The reduction averages the gradients over replicas, so a term with a count is multiplied by their number.
        ``micro_batches`` is the number per replica in the step.
        """
        total: Tensor | None = None
        for name, term in loss.items():
            if term.count is None:
                part = term.sum / micro_batches
            else:
                part = term.sum.double() * (self._data_parallel_size / self._divisor(name, micro_batches))
            total = part if total is None else total + part
        assert total is not None
        return total

    def _divisor(self, name: str, micro_batches: int) -> Tensor:
        """Return the count by which the gradients of a term are divided, over all replicas."""
        if name not in self._divisors:
            if self._declared_counts is None:
                power = 2.0 ** (micro_batches * self._data_parallel_size).bit_length()  # exact in every dtype
                self._divisors[name] = torch.tensor(power, dtype=torch.float64, device=self._device)
                return self._divisors[name]
            counts = self._declared_counts.values
            if name not in counts:
                raise ConfigError(
                    f"loss_fn.counts: must count every term of the loss (got {list(counts)}, and a loss "
                    f"with the term {name!r})."
                )
            self._divisors[name] = _positive(counts[name].to(self._device))
        return self._divisors[name]

    def add(self, loss: Loss, weight: float = 1.0) -> None:
        """Add the loss of a micro-batch, and the additional losses that the module reports for it.

        ``weight`` is that in the means, for a slice its share of the tokens. Counts are weights already, except that 0
        omits the micro-batch.
        """
        # On all tensor-parallel ranks: the module may communicate.
        additional = self._module.get_additional_losses() or {}
        if not self._counts_here or not weight:
            return
        self._weight += weight
        for name, term in loss.items():
            if term.check is not None:
                self._checks.setdefault(name, []).append(term.check.to(self._device))
            if term.count is None:
                self._add(name, "mean", _weighted(term.sum, weight), weight)
            else:
                self._add(name, "count", term.sum, term.count)
        for name, value in additional.items():
            if name not in loss:
                self._add(name, "additional", _weighted(value, weight), 0.0)

    def _add(self, name: str, kind: str, value: Number, count: Number) -> None:
        if self._local_kinds.setdefault(name, kind) != kind:
            raise ConfigError(
                f"loss_fn: must return losses of one form in a step (got means and pairs of {name or 'one term'!r})."
            )
        if isinstance(value, Tensor):
            value = value.detach().reshape(()).to(self._device)
        self._terms.setdefault(name, []).append((value, count))

    def numbers(self) -> list[float]:
        """Return sum, count, divisor and check of every name, for :meth:`result`. All ranks must call this together."""
        numbers: list[Number] = []
        for name, kind in self._agreed_kinds().items():
            values, counts = zip(*self._terms.get(name, [(0.0, 0.0)]), strict=True)
            counts = [self._weight] if kind == "additional" else counts
            checks = join_checks(self._checks[name]) if name in self._checks else [0.0] * 3
            numbers += _TermNumbers(_sum(values), _sum(counts), self._divisors.get(name, 0.0), *checks)
        tensors = [number.to(self._device) for number in numbers if isinstance(number, Tensor)]
        floats = iter(torch.stack(tensors).tolist() if tensors else ())  # one wait for a GPU
        return [next(floats) if isinstance(number, Tensor) else number for number in numbers]

    def _agreed_kinds(self) -> dict[str, str]:
        """Return name -> kind in the same order on all ranks, which share theirs in the first step."""
        if not self._kinds.get(self._trains):
            kinds_of_ranks = on_all_ranks(lambda: self._local_kinds)
            self._kinds[self._trains] = {
                name: kind for kinds in kinds_of_ranks for name, kind in kinds.items()
            }
        agreed = self._kinds[self._trains]
        unknown = [name or "the loss" for name, kind in self._local_kinds.items() if agreed.get(name) != kind]
        if unknown:
            raise ConfigError(
                f"loss_fn, get_additional_losses: return new names or other forms after the first step (got "
                f"{', '.join(unknown)}). Return the same in every step, with 0 for a loss that does not apply."
            )
        return agreed

    def result(self, table: Sequence[Sequence[float]]) -> StepMeans:
        """Return the losses of all ranks, from a ``table`` with the :meth:`numbers` of each, one row per rank."""
        kinds = self._kinds.get(self._trains, {})
        columns = iter(zip(*table, strict=True))
        means: dict[str, float] = {}
        counts: dict[str, float] = {}
        correction = 1.0
        for name, kind in kinds.items():
            of_ranks = _TermNumbers(*itertools.islice(columns, len(_TermNumbers._fields)))
            count, divisor = sum(of_ranks.counted), max(of_ranks.divisor)
            if functools.reduce(operator.or_, map(int, of_ranks.differing_ways)) == 2**WAYS - 1:
                returned, labels = sum(of_ranks.returned), sum(of_ranks.labels)
                raise ConfigError(
                    f"loss_fn: the second value of a pair (sum, count) must be the number of counted labels (got "
                    f"{returned:g} in the step, whose micro-batches have {labels:g} labels other than -100). Report a "
                    f"metric by the attribute additional_losses, and return the loss alone; or add a method "
                    f"counts(labels) that returns the same count (docs/own_scripts.md)."
                ).of_all_ranks()
            means[name] = sum(of_ranks.total) / (count or 1.0)
            if kind == "count":
                counts[name] = count
                correction = self._correction(name, count, divisor, correction)
        if not all(0 <= count < math.inf for count in counts.values()):
            raise ConfigError(
                f"loss_fn: counts must be finite and not negative (got {', '.join(map(str, counts.values()))})."
            ).of_all_ranks()
        if self._trains and len(counts) > 1 and self._loss.counts is None:
            raise _several_terms_error(counts)
        if counts and not any(counts.values()) and "mean" not in kinds.values():
            correction = 0.0
        terms = [mean for name, mean in means.items() if kinds[name] != "additional"]
        parts = {name: self._fp32(mean) for name, mean in means.items() if name != _ONLY}
        tokens = round(next(iter(counts.values()))) if counts else None
        return StepMeans(self._fp32(sum(terms)), parts or None, tokens, correction)

    def _fp32(self, number: float) -> Tensor:
        return torch.tensor(number, dtype=torch.float64).to(self._device, torch.float32)

    def _correction(self, name: str, count: float, divisor: float, correction: float) -> float:
        """Return the factor for the gradients after one more term: ``correction`` if its divisor was its count."""
        if divisor == 0 or math.isclose(divisor, count or 1.0, rel_tol=1e-6):  # 0: an evaluation
            return correction
        if self._loss.counts is not None:
            term = f" of the term {name!r}" if name else ""
            raise ConfigError(
                f"loss_fn.counts: must return the counts that the loss function returns (got {divisor:g} labels{term}, "
                f"and {count:g} in the losses of the step)."
            ).of_all_ranks()
        return divisor / (count or 1.0)


class _Reduced:
    """Values summed over the ranks of a group while the caller goes on. The names are the same on all ranks.

    Without a ``group``, they are those of this rank. The reduction uses ``device`` unless the backend is gloo.
    """

    def __init__(self, values: Mapping[str, float], group: ProcessGroup | None, device: torch.device) -> None:
        self._names = list(values)
        self._work = None
        on_host = group is None or dist.get_backend(group) == "gloo"
        self._tensor = torch.tensor(
            [*values.values()], dtype=torch.float64, device="cpu" if on_host else device
        )
        if group is not None:
            self._work = dist.all_reduce(self._tensor, group=group, async_op=True)

    @functools.cached_property
    def values(self) -> dict[str, Tensor]:
        """Reduced values. The first access waits for them."""
        if self._work is not None:
            self._work.wait()
        return dict(zip(self._names, self._tensor.unbind(), strict=True))


def _sum(numbers: Sequence[Number]) -> Number:
    """Return the sum of numbers: a float64 tensor if one of them is a tensor."""
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    sum_of_floats = float(sum(number for number in numbers if not isinstance(number, Tensor)))
    return torch.stack(tensors).double().sum() + sum_of_floats if tensors else sum_of_floats


def _weighted(value: Number, weight: float) -> Number:
    """Return the weighted value of a micro-batch, in float64 unless the weight is 1."""
    if weight == 1:
        return value
    return (value.double() if isinstance(value, Tensor) else value) * weight


def _positive(count: Tensor) -> Tensor:
    """Return counts with 1 in the place of 0, by which sums without labels are divided."""
    return torch.where(count == 0, 1.0, count)


def _several_terms_error(names: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"loss_fn: a loss with several terms needs a method counts(labels) that returns name -> count (got the terms "
        f"{', '.join(names)}). Or return one pair (sum, count)."
    ).of_all_ranks()


def _by_term(value: Batch) -> Mapping[str, Batch]:
    """Return name -> value of a term, from a result of the loss function or of ``counts``."""
    return value if isinstance(value, Mapping) else {_ONLY: value}


def _make_term(value: Batch) -> Term:
    total, count = value, None
    if isinstance(value, tuple | list) and len(value) == 2:
        total, number = value
        count = _make_count(number, total.device if isinstance(total, Tensor) else None)
    if isinstance(total, int | float):
        raise ConfigError(
            f"loss_fn: must return a tensor that requires grad (got the {type(total).__name__} {total}). "
            f"Remove .item() or float()."
        )
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise ConfigError(
            f"loss_fn (or the last layer without one): must return a single number per micro-batch, or a pair (sum, "
            f"count) (got a {_describe(total)}). Return the mean."
        )
    if count is not None and total.dtype == torch.float16:
        raise ConfigError(
            "loss_fn: the sum of a pair (sum, count) must not be fp16, because it would overflow (got torch.float16). "
            "Compute the loss from outputs.float()."
        )
    if torch.is_grad_enabled() and not total.requires_grad:
        raise ConfigError(
            "loss_fn: the loss must have a gradient (got a tensor without grad_fn). Compute it from the outputs, "
            "without detach() or torch.no_grad()."
        )
    return Term(total.reshape(()), count)


def _make_count(count: object, device: torch.device | None) -> Tensor:
    is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
    if not is_number or getattr(count, "requires_grad", False):  # (loss, other loss) is no pair
        raise ConfigError(
            f"loss_fn: the count of a pair (sum, count) must be one number without a gradient (got "
            f"{_describe(count)}). Return the number of counted labels of the micro-batch; report other losses "
            f"by the attribute additional_losses."
        )
    if isinstance(count, Tensor) and count.dtype in (torch.float16, torch.bfloat16):
        raise ConfigError(
            f"loss_fn: the count of a pair (sum, count) must not be in half precision, which rounds it (got "
            f"{count.dtype}). Sum the mask as mask.float().sum()."
        )
    return torch.as_tensor(count, dtype=torch.float64, device=device).reshape(())


def _checked(term: Term, tensors: Sequence[object]) -> Term:
    """Return a term with the check of its count by labels, and masks beside them; without any, it must be whole."""
    return term if term.count is None else Term(term.sum, term.count, check_count(term.count, tensors))


def _describe(value: object) -> str:
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
