"""Audit of a training step: it finds memory, transfer and arithmetic faults that change no loss visibly.

Ranks that hold the same stages (mirrors and data-parallel ranks) must have bitwise equal weights, which also must not
change while a step computes. One of them keeps the data of one forward and backward, and the others repeat it and must
get the same bits. They start with its random numbers and buffers, so this holds with dropout and with state in buffers.

All of this happens before the optimizer step, so a fault of this step is not yet in the weights.
"""

from __future__ import annotations

import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor
from torch.distributed import ProcessGroup

from ...errors import ConfigError, CorruptionError
from ...pipe_schedules.bridge import BackwardInput
from ...pipe_schedules.ops import FORWARD, Op
from ...tensor_parallel import WeightGradients, deferring
from ..all_ranks import on_all_ranks
from ..deepspeed_api.recompute import Values, all_buffers_of, preserve_buffers
from ..engine_state import EngineState
from ..evaluation import Evaluation
from ..executor import Observer
from ..messages import pack
from ..stages.buffer import Buffer, Root
from ..step import BackwardContext, Step
from ..types import Batch, Pair

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20  # elements that a checksum converts to int64 at a time, to bound the memory
_FOLD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio as int64; odd, so that no bit is lost
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Weights = dict[tuple[int, int], int]  # (stage, tensor-parallel rank) -> tensor_checksum
Problem = tuple[list[int], str]  # ranks, and what is wrong with them
Result = tuple[int, int]  # checksums of the outputs and of the gradients of the inputs
Results = tuple[Result, ...]  # of every slice


def tensor_checksum(tensors: Iterable[Tensor]) -> int:
    """Return a 64-bit checksum of the bits of tensors, computed on their device; 0 without tensors.

    Every element counts, as an integer, with an odd factor modulo 2^64, so one flipped bit always changes it.
    """
    total: Tensor | None = None
    for tensor in tensors:
        elements = tensor.detach().contiguous().view(-1)
        integers = elements.view(_INTEGERS.get(elements.element_size(), torch.uint8))
        for chunk in integers.split(_CHUNK):
            factors = 2 * torch.arange(len(chunk), device=chunk.device) + 1
            chunk_sum = (chunk.to(torch.int64) * factors).sum()
            total = chunk_sum if total is None else total.to(chunk_sum.device) * _FOLD + chunk_sum
    return 0 if total is None else int(total)


@dataclass(frozen=True)
class Pass:
    """Data of the forward and backward of one slice of a micro-batch at one stage, from which other ranks repeat them.

    Attributes:
        leaves: which of the inputs get gradients.
        labels: labels of the micro-batch; last stage only.
        buffers: buffers of the stage before the forward, which layers may update and use.
        grads: gradients of the outputs; None for the last stage.
        random: states of the random-number generators before the forward, by kind of device.
    """

    inputs: tuple[Tensor, ...]
    leaves: tuple[bool, ...]
    labels: tuple[Tensor, ...] | None
    buffers: tuple[Tensor, ...]
    random: dict[str, Tensor]
    grads: tuple[Tensor, ...] | None = None
    result: Result = (0, 0)


@dataclass(frozen=True)
class Evidence:
    """Forward and backward of one micro-batch at one stage.

    Attributes:
        op: the forward, of the first slice.
        number: global number of the micro-batch.
        splits: whether its backward is split.
        passes: of every slice, in order.
    """

    op: Op
    number: int
    splits: bool
    passes: tuple[Pass, ...]

    @property
    def results(self) -> Results:
        return tuple([one.result for one in self.passes])


@dataclass(frozen=True)
class Finding:
    """Result of one rank's audit.

    Attributes:
        place: host and device.
        before: checksums of the weights before the first computation of the step.
        after: the same after the last one.
        owner: rank whose computation was repeated.
        op: that computation.
        original: its checksums.
        results: checksums that this rank computed.
    """

    place: str
    before: Weights
    after: Weights
    owner: int
    op: Op
    original: Results
    results: Results


class _Repeated:
    """Data of a repeated micro-batch, whose loss does not count. ``first_id`` is its global number."""

    def __init__(self, first_id: int) -> None:
        self.first_id = first_id

    def take(self, micro_batch: int) -> Pair:
        raise AssertionError("a repeated forward has its inputs")

    def weight(self, micro_batch: int) -> float:
        return 0.0


class StepAudit(Observer):
    """Audits of this rank. It observes audited steps only.

    ``clean`` is the number of the last step whose audit found nothing; 0 before the first one.
    """

    kinds = (ds.ForwardPass, ds.BackwardPass, BackwardInput)

    def __init__(self, engine: EngineState, interval: int, stop: Callable[[str], None] | None) -> None:
        self._engine, self._interval, self._stop = engine, interval, stop
        self._group: ProcessGroup = engine.mpu.get_data_parallel_group()
        self._members: list[int] = dist.get_process_group_ranks(self._group)
        self._place = f"host {socket.gethostname()}, {engine.device}"
        self.clean = self.done = 0
        self._active = False  # whether the current step is audited
        self._watched: Op | None = None  # first forward to repeat, on its owner during an audited step
        self._passes: list[Pass] = []  # of the watched slices that have begun
        self._before: Weights = {}
        self._has_warned = False

    @property
    def _owner(self) -> int:
        """Rank whose computation is repeated: the members of the group, one after the other."""
        return self._members[self.done % len(self._members)]

    def start_step(self, step: int) -> bool:
        """Return whether training step ``step``, from 1, is audited, after taking the checksums of the weights."""
        self._active = step % self._interval == 0
        if not self._active:
            return False
        self._engine.wait_for_weights()
        self._before = self._weight_checksums()
        self._passes = []
        self._watched = self._next_forward() if self._owner == self._engine.global_rank else None
        return True

    def _next_forward(self) -> Op:
        """Return the first forward of the slices to repeat: after each member has had its turn, the next ones."""
        timetable, device = self._engine.plan.timetable, self._engine.module.device_index
        stages = timetable.placement.stages  # without the parts of a head
        forwards = [
            op
            for op in timetable.orders[device]
            if op.kind == FORWARD and op.slice == 0 and op.stage < stages
        ]
        return forwards[self.done // len(self._members) % len(forwards)]

    # --- recording, around the instructions ---

    def before(self, instruction: ds.PipeInstruction) -> None:
        """Keep the inputs of a watched forward, and the gradients that its backward starts from."""
        if not self._watches(instruction):
            return
        buffer = self._engine.executor.buffers[instruction.buffer_id]
        if isinstance(instruction, ds.ForwardPass):
            self._passes.append(self._make_pass(buffer))
        else:
            self._change(instruction, grads=_copy_to_host(buffer.grads))

    def after(self, instruction: ds.PipeInstruction) -> None:
        """Take the checksums of what a watched forward or backward has computed."""
        if not self._watches(instruction):
            return
        buffer = self._engine.executor.buffers[instruction.buffer_id]
        forward, backward = self._passes[_slice(instruction)].result
        if isinstance(instruction, ds.ForwardPass):
            forward = tensor_checksum(_outputs(buffer))
        else:
            # A layer that changes the data in place makes it part of the graph, without a gradient.
            backward = tensor_checksum(
                t.grad for t in buffer.inputs or () if t.is_leaf and t.grad is not None
            )
        self._change(instruction, result=(forward, backward))

    def _change(self, instruction: ds.PipeInstruction, **changes: object) -> None:
        self._passes[_slice(instruction)] = replace(self._passes[_slice(instruction)], **changes)

    def _watches(self, instruction: ds.PipeInstruction) -> bool:
        op = self._watched
        return op is not None and instruction.stage == op.stage and instruction.micro_batch == op.micro_batch

    def _make_pass(self, buffer: Buffer) -> Pass:
        assert self._watched is not None and buffer.inputs is not None
        engine = self._engine
        layer_buffers = all_buffers_of(engine.module.stage_modules(self._watched.stage).values())
        return Pass(
            inputs=_copy_to_host(buffer.inputs) or (),
            leaves=tuple(t.requires_grad for t in buffer.inputs),
            labels=_copy_to_host(buffer.labels),
            buffers=_copy_to_host(tuple(tensor for _, _, tensor in layer_buffers)) or (),
            random=_random_states(engine.device),
        )

    def _evidence(self) -> Evidence | None:
        op = self._watched
        if op is None:
            return None
        number = self._engine.executor.data.first_id + op.micro_batch
        splits = (op.stage, op.micro_batch) in self._engine.plan.timetable.split_backwards
        return Evidence(op, number, splits, tuple(self._passes))

    # --- comparison ---

    def finish(self) -> None:
        """Compare the ranks of an audited step, before the optimizer step. All ranks must call this together."""
        if not self._active:
            return
        step = self._engine.global_steps + 1
        after = self._weight_checksums()
        box: list[Evidence | None] = [self._evidence()]
        dist.broadcast_object_list(box, src=self._owner, group=self._group)
        evidence = box[0]
        assert evidence is not None
        repeats = self._engine.global_rank != self._owner or len(self._members) == 1

        def find() -> Finding:
            original = evidence.results
            results = self._repeat(evidence) if repeats else original
            return Finding(self._place, self._before, after, self._owner, evidence.op, original, results)

        findings: list[Finding] = on_all_ranks(find)
        differing = differing_weights(findings)
        problem = changed_weights(findings) or differing
        if problem is None and any(finding.results != finding.original for finding in findings):
            problem = self._faulty_computation(findings, evidence)
        self._watched, self._passes = None, []
        if problem is not None:
            self._raise(problem, step, lasting=differing is not None)
        self.clean = step
        self.done += 1

    def _faulty_computation(self, findings: Sequence[Finding], evidence: Evidence) -> Problem:
        """Return the ranks at fault for different results. All ranks call this together, and repeat twice more.

        A rank that does not get its first result again is at fault; if all do, two ranks with different results are.
        """
        runs: list[tuple[Results, Results]] = on_all_ranks(
            lambda: (self._repeat(evidence), self._repeat(evidence))
        )
        faulty = []
        changing = []  # ranks whose two repetitions differ
        for rank, (finding, (second, third)) in enumerate(zip(findings, runs, strict=True)):
            first = finding.original if rank == finding.owner else finding.results
            if first != second:
                faulty.append(rank)
            if second != third:
                changing.append(rank)
        if changing or len(faulty) > 1:
            self._refuse_layer(changing or faulty, findings, evidence)
        if faulty:
            op = findings[faulty[0]].op
            return faulty, f"{_places(faulty, findings)} did not compute {op} twice with the same result"
        rank = next(rank for rank, finding in enumerate(findings) if finding.results != finding.original)
        pair = sorted({rank, findings[rank].owner})
        return (
            pair,
            f"{_places(pair, findings)} compute {findings[rank].op} with different results, each of them every time. "
            f"If their processors, libraries or a layer's own state differ, set audit_interval to 0; otherwise one of "
            f"them is faulty",
        )

    def _refuse_layer(self, ranks: list[int], findings: Sequence[Finding], evidence: Evidence) -> NoReturn:
        """Raise ConfigError with the first layer whose outputs differ between two repetitions."""

        def find() -> str:
            first, second = self._layer_results(evidence), self._layer_results(evidence)
            differing = [index for index in first if first[index] != second.get(index)]
            layers = self._engine.module.stage_modules(evidence.op.stage)
            names = [f"layer {index} ({type(layers[index]).__name__})" for index in sorted(differing)]
            return names[0] if names else f"a layer of stage {evidence.op.stage}"

        names: list[str] = on_all_ranks(find)
        raise ConfigError(
            f"audit_interval: {names[ranks[0]]} does not repeat itself (got different results from the same inputs, "
            f"weights, buffers and random numbers on {_places(ranks, findings)}). Keep its state in buffers and use "
            f"torch's random numbers, or set audit_interval to 0. If it has no other state, the processor is faulty."
        ).of_all_ranks()

    def _layer_results(self, evidence: Evidence) -> dict[int, int]:
        """Repeat the computation. Returns the checksum of every layer's outputs."""
        results: dict[int, int] = {}

        def record(index: int, _module: object, _inputs: object, outputs: Batch) -> None:
            results[index] = tensor_checksum(pack(outputs, f"layer {index}"))

        layers = self._engine.module.stage_modules(evidence.op.stage)
        hooks = [layer.register_forward_hook(partial(record, index)) for index, layer in layers.items()]
        try:
            self._repeat(evidence)
        finally:
            for hook in hooks:
                hook.remove()
        return results

    def _raise(self, problem: Problem, step: int, lasting: bool) -> NoReturn:
        """Raise CorruptionError. If the corruption is ``lasting``, ranks that the launcher restarts do not continue."""
        ranks, text = problem
        last_clean = (
            f"step {self.clean} was the last to pass an audit" if self.clean else "no step passed an audit"
        )
        error = CorruptionError(
            f"audit of step {step}: {text} ({last_clean}). Take the faulty host out of the job, and continue from a "
            f"checkpoint that is not newer.",
            ranks,
            lasting,
        )
        if lasting and self._stop is not None:
            self._stop(str(error))
        raise error.of_all_ranks()

    def _weight_checksums(self) -> Weights:
        """Return the checksum of the weights of every stage of this rank, frozen ones included."""
        engine = self._engine
        _, _, tensor_rank = engine.layout.coordinates(engine.global_rank)
        checksums: Weights = {}
        for stage in engine.module.stages:
            layers = engine.module.stage_modules(stage).values()
            parameters = dict.fromkeys(p for layer in layers for p in layer.parameters())  # each once
            checksums[stage, tensor_rank] = tensor_checksum(parameters)
        return checksums

    def _repeat(self, evidence: Evidence) -> Results:
        """Repeat the forwards and backwards of ``evidence`` on this rank, and return their checksums.

        Gradients of weights and buffers stay unchanged. The backward of a reentrant checkpoint cannot be repeated: a
        warning is logged once, and its original checksum is returned.
        """
        engine, stage = self._engine, evidence.op.stage
        sequences = engine.executor.sequences.copy_empty()
        splits = frozenset({(stage, 0)} if evidence.splits else ())
        data, context = (
            _Repeated(evidence.number),
            BackwardContext(engine.executor.backward_context.backward_root),
        )
        step = Step(engine.global_steps, data, sequences, Evaluation(), splits, context)
        buffers = [self._repeat_forward(evidence, i, step) for i in range(len(evidence.passes))]
        forwards = [tensor_checksum(_outputs(buffer)) for buffer in buffers]
        backwards: list[int] = []
        for slice_index in reversed(range(len(buffers))):
            buffer, one = buffers.pop(), evidence.passes[slice_index]
            buffer.grads = _copy_to(one.grads, engine.device)
            try:
                with sequences.backward(stage, 0, slice_index) as (roots, leaves):
                    roots = [*buffer.take_roots(context.backward_root), *roots]
                    backwards.append(
                        tensor_checksum(_gradients(roots, buffer.inputs or (), leaves, evidence.splits))
                    )
            except RuntimeError as error:
                if ".grad()" not in str(error):  # torch: "incompatible with .grad()"
                    raise
                self._warn_of_reentrance(stage)
                backwards.append(one.result[1])
        return tuple(zip(forwards, reversed(backwards), strict=True))

    def _repeat_forward(self, evidence: Evidence, slice_index: int, step: Step) -> Buffer:
        """Repeat the forward of a slice. Returns its outputs with their graph."""
        engine, stage, one = self._engine, evidence.op.stage, evidence.passes[slice_index]
        inputs = tuple(
            _copy(t, engine.device).requires_grad_(leaf)
            for t, leaf in zip(one.inputs, one.leaves, strict=True)
        )
        buffer = Buffer(inputs, _copy_to(one.labels, engine.device))
        layers = engine.module.stage_modules(stage).values()
        values = {
            (module, name): value.to(tensor.device)
            for (module, name, tensor), value in zip(all_buffers_of(layers), one.buffers, strict=True)
        }
        with _start_state(layers, values, one.random, engine.device):
            engine.executor.stages[stage].forward(step, buffer, 0, slice_index)
        return buffer

    def _warn_of_reentrance(self, stage: int) -> None:
        if not self._has_warned:
            logger.warning(
                "audit_interval: stage %d has layers with reentrant checkpoints, whose backward cannot be "
                "repeated. Audits compare only their outputs. Use use_reentrant=False.",
                stage,
            )
        self._has_warned = True


def _slice(instruction: ds.PipeInstruction) -> int:
    return instruction.kwargs.get("slice", 0)


def _gradients(
    roots: Sequence[Root], inputs: Iterable[Tensor], leaves: Sequence[Tensor], splits: bool
) -> list[Tensor]:
    """Return the gradients of the inputs that have one, without adding to those of the weights.

    ``roots`` are outputs with their gradients. Gradients of ``leaves``, tensors of earlier slices, are added to them.
    """
    inputs, others = ([t for t in tensors if t.requires_grad and t.is_leaf] for tensors in (inputs, leaves))
    if not roots or not inputs + others:
        return []
    outputs, output_grads = zip(*roots, strict=True)
    # The collected weight gradients are dropped: only those of the inputs are compared.
    with deferring(WeightGradients()) if splits else nullcontext():
        grads = torch.autograd.grad(outputs, inputs + others, output_grads, allow_unused=True)
    for leaf, grad in zip(others, grads[len(inputs) :], strict=True):
        if grad is not None:
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    return [grad for grad in grads[: len(inputs)] if grad is not None]


def changed_weights(findings: Sequence[Finding]) -> Problem | None:
    changed = [rank for rank, finding in enumerate(findings) if finding.before != finding.after]
    if not changed:
        return None
    return changed, f"{_places(changed, findings)} changed weights in memory while the step computed"


def differing_weights(findings: Sequence[Finding]) -> Problem | None:
    """Return the ranks whose weights differed before the step from those of the other copies; None if all are equal.

    These are the ranks outside the largest group with equal weights, or all ranks if no group is the largest.
    """
    # (stage, tensor-parallel rank) -> checksum -> ranks with it
    ranks_by_checksum: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, finding in enumerate(findings):
        for place, number in finding.before.items():
            ranks_by_checksum[place][number].append(rank)
    differing = {place: [*by.values()] for place, by in ranks_by_checksum.items() if len(by) > 1}
    if not differing:
        return None
    stages = _stage_list(sorted({stage for stage, _ in differing}))
    minority = sorted({rank for groups in differing.values() for rank in _minority(groups)})
    if minority:
        return minority, f"{_places(minority, findings)} have other weights of {stages} than the others"
    ranks = sorted({rank for groups in differing.values() for group in groups for rank in group})
    return ranks, f"{_places(ranks, findings)} have different weights of {stages}"


def _minority(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks outside the largest group; none if several groups are the largest."""
    largest = max(map(len, groups))
    if sum(len(ranks) == largest for ranks in groups) > 1:
        return []
    return [rank for ranks in groups if len(ranks) < largest for rank in ranks]


def _stage_list(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _places(ranks: Sequence[int], findings: Sequence[Finding]) -> str:
    return " and ".join(f"rank {rank} ({findings[rank].place})" for rank in ranks)


def _outputs(buffer: Buffer) -> list[Tensor]:
    return [*(buffer.outputs or ()), *(term.sum for term in (buffer.loss or {}).values())]


def _copy_to_host(tensors: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
    """Return copies in host memory, because the originals are dropped or changed."""
    return _copy_to(tensors, torch.device("cpu"))


def _copy_to(tensors: tuple[Tensor, ...] | None, device: torch.device) -> tuple[Tensor, ...] | None:
    return None if tensors is None else tuple(_copy(t.detach(), device) for t in tensors)


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy with the same strides, because sums of other strides may round in another order."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return tensor.to(device, copy=True)
    single = tensor[tuple(slice(1) if not stride else slice(None) for stride in tensor.stride())]
    copy = torch.empty_strided(single.shape, single.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(single).expand(tensor.shape)


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def _start_state(
    layers: Iterable[torch.nn.Module], buffers: Values, random: Mapping[str, Tensor], device: torch.device
) -> Iterator[None]:
    """Context with the buffers and random states of the start of a computation. On exit, the present ones are back."""
    states = _random_states(device)
    _set_random_states(random, device)
    try:
        with preserve_buffers(layers, buffers):
            yield
    finally:
        _set_random_states(states, device)
