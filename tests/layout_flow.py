"""Flow of gradients through memory: from the backwards, through copies and collectives, to norms and the optimizer.

A mode of torch sees every operation of a reduction or an update, those of DeepSpeed too. It keeps a table of the
memory that holds gradients: which elements of which parameter, scaled by which factor, summed by which collectives.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ds_ext

REPLICATED, PARTIAL, SHARDED, DIFFERS = (
    "replicated",
    "partial sum",
    "sharded",
    "differs",
)  # types over an axis
PRODUCT = os.path.dirname(os.path.abspath(ds_ext.__file__))
_COPIES = {"clone", "_to_copy", "copy", "contiguous", "_foreach_clone"}
_SCALES = {
    name + end: sign
    for name, sign in {"mul": 1, "div": -1, "_foreach_mul": 1, "_foreach_div": -1}.items()
    for end in ("", "_")
}
_NORMS = {"linalg_vector_norm", "norm", "_foreach_norm"}


class Fault(NamedTuple):
    """Tensor with another type than its use needs.

    Attributes:
        name: parameter or message.
        found, axis: its type over an axis of the layout.
        expected: type that its use needs.
        line: line of the product.
        detail: ranks and numbers.
    """

    name: str
    found: str
    axis: str
    expected: str
    line: str
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return (
            f"{self.name}: {self.found} over {self.axis}{detail}, expected {self.expected} (at {self.line})."
        )


class Piece(NamedTuple):
    """Elements of a parameter's gradient.

    Attributes:
        name: parameter.
        start, stop: range in the flattened gradient. A complex element counts twice.
        sums: collectives that summed it, oldest first: indices in the events of this rank.
        scale: factor of the gradient.
        is_half: it has been in half precision.
    """

    name: str
    start: int
    stop: int
    sums: tuple[int, ...] = ()
    scale: float = 1.0
    is_half: bool = False

    def part(self, first: int, last: int) -> Piece:
        """Return elements ``first`` to ``last`` - 1 of these."""
        return Piece(self.name, self.start + first, self.start + last, *self[3:])


class Square(NamedTuple):
    """Number that depends on the norms of gradients.

    Attributes:
        pieces: gradients in it.
        sums: collectives that summed it, as for a piece.
        joined: numbers, summed by other collectives, that were added to it.
    """

    pieces: tuple[Piece, ...] = ()
    sums: tuple[int, ...] = ()
    joined: tuple[Square, ...] = ()


class Event(NamedTuple):
    """Collective of one group.

    Attributes:
        ranks: global ranks of the group.
        number: how many collectives of this group came before it in the step.
        content: (first element, piece or number) of this rank.
        line: line that called it.
    """

    ranks: tuple[int, ...]
    number: int
    content: tuple[tuple[int, Piece | Square], ...]
    line: str


Content = list[tuple[int, Any]]


class Memory:
    """Table of the pieces and numbers in memory, which is not freed while the table has it."""

    def __init__(self) -> None:
        self._regions: dict[
            int, list[tuple[int, int, int, Any]]
        ] = {}  # storage -> bytes, element size, value
        self._kept: dict[int, Any] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._regions.clear()
        self._kept.clear()

    def read(self, tensor: Tensor) -> Content:
        """Return (element of the flattened tensor, piece or number) for each region in a tensor."""
        if not self._regions or tensor.layout != torch.strided:
            return []
        regions = self._regions.get(tensor.untyped_storage().data_ptr())
        if not regions:
            return []
        size, (first, last) = real_size(tensor), _extent(tensor)
        inside = [region for region in regions if region[0] < last and region[1] > first]
        if not tensor.is_contiguous():
            # In another order, only whole gradients are followed.
            return [(0, value) for begin, end, _, value in inside if (begin, end) == (first, last)]
        content: Content = []
        for begin, end, element, value in inside:
            start, stop = max(begin, first), min(end, last)
            if isinstance(value, Piece) and (start, stop) != (begin, end):
                value = value.part((start - begin) // element, (stop - begin) // element)
            content.append(((start - first) // size, value))
        return content

    def write(self, tensor: Tensor, content: Content) -> None:
        """Set what a tensor contains. A tensor with gaps between its elements gets nothing."""
        if not tensor.numel() or tensor.layout != torch.strided:
            return
        storage, size, (first, last) = tensor.untyped_storage(), real_size(tensor), _extent(tensor)
        address = storage.data_ptr()
        regions = []
        for region in self._regions.get(address, ()):
            if region[1] <= first or region[0] >= last:
                regions.append(region)
            else:
                regions += _outside(region, first, last)
        if last - first == tensor.numel() * tensor.element_size():
            for element, value in content:
                count = value.stop - value.start if isinstance(value, Piece) else (last - first) // size
                begin = first + element * size
                regions.append((begin, begin + count * size, size, value))
        if regions or address in self._regions:
            self._regions[address] = sorted(regions, key=lambda region: region[0])
            self._kept[address] = storage


def real_size(tensor: Tensor) -> int:
    """Return the bytes of a real number in a tensor."""
    return tensor.element_size() // (2 if tensor.is_complex() else 1)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and that behind the last one."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (first + (length if tensor.numel() else 0)) * size


def _outside(region: tuple[int, int, int, Any], first: int, last: int) -> Iterator[tuple[int, int, int, Any]]:
    """Yield what is left of a region without the bytes ``first`` to ``last`` - 1."""
    begin, end, size, value = region
    for start, stop in ((begin, min(end, first)), (max(begin, last), end)):
        if start < stop:
            cut = isinstance(value, Piece)
            yield (
                start,
                stop,
                size,
                value.part((start - begin) // size, (stop - begin) // size) if cut else value,
            )


@dataclass
class Flow:
    """Flow of one rank's gradients in a step.

    Attributes:
        memory: where they are.
        events: collectives of the step.
        norms: numbers that were read or summed over ranks, with the line.
        faults: wrong operations.
        begun: parameter -> line of the first collective with its gradient.
        running: parameters with a collective that its caller does not wait for at once.
        lost: parameter -> line of an operation without a rule.
        weights: address of a parameter -> (name, number of real elements).
        in_update: the optimizer step has begun.
        in_backward: gradients of a backward are being added.
    """

    memory: Memory = field(default_factory=Memory)
    events: list[Event] = field(default_factory=list)
    norms: list[tuple[Square, str]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    begun: dict[str, str] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    weights: dict[int, tuple[str, int]] = field(default_factory=dict)
    in_update: bool = False
    in_backward: bool = False
    _numbers: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _scattered: set[int] = field(default_factory=set)  # addresses of parts

    def clear(self) -> None:
        """Begin a new step."""
        self.memory.clear()
        for container in (
            self.events,
            self.norms,
            self.faults,
            self.begun,
            self.running,
            self.lost,
            self._numbers,
            self._scattered,
        ):
            container.clear()
        self.in_update = self.in_backward = False

    def mode(self) -> TorchDispatchMode:
        """Return a mode of torch in which operations are followed."""
        return _Mode(self)

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operation, and note what it does."""
        if function.namespace == "c10d":
            return self._collect(function, args, kwargs)
        result = function(*args, **kwargs)
        if function.is_view:
            return result
        name = function._schema.name.partition("::")[2]
        read = self.memory.read
        if name == "zeros_like" and (entry := self.weights.get(args[0].data_ptr())) is not None:
            self.memory.write(result, [(0, Piece(entry[0], 0, entry[1]))])
        elif name == "cat":
            content, first = [], 0
            for tensor in args[0]:
                content += [(first + element, value) for element, value in read(tensor)]
                first += tensor.numel() * tensor.element_size() // real_size(tensor)
            self._write_or_join(result, content)
        elif name == "copy_" and args[0].data_ptr() in self._scattered:
            self._scattered.remove(args[0].data_ptr())  # gloo copies its part when its caller waits
        elif name == "copy_":
            self._require_no_backward(args[0])
            self._convert(args[0], read(args[1]), args[1])
        elif name in _COPIES:
            self._convert(result, read(args[0]), args[0])
        elif name in ("zero_", "fill_"):
            self.memory.write(args[0], [])
        elif name in ("add_", "add"):
            self._add(result, *args[:2])
        elif name in _SCALES and self._scale(args[0] if result is None else result, args, _SCALES[name]):
            pass
        elif name in _NORMS and (name == "_foreach_norm" or len(args) < 2 or args[1] in (None, 2)):
            for number, tensor in zip(_tensors(result), _tensors(args[0]), strict=True):
                if content := read(tensor):
                    self.memory.write(number, [(0, _join(value for _, value in content))])
        else:
            self._other(name, function, result, args)
        return result

    def _write_or_join(self, result: Tensor, content: Content) -> None:
        if any(isinstance(value, Square) for _, value in content):
            content = [(0, _join(value for _, value in content))]
        if content:
            self.memory.write(result, content)

    def _convert(self, result: Tensor, content: Content, source: Any) -> None:
        if not isinstance(source, Tensor) or source.numel() != result.numel():
            content = []
        if result.element_size() // (2 if result.is_complex() else 1) == 2:
            content = [(i, v._replace(is_half=True) if isinstance(v, Piece) else v) for i, v in content]
        self.memory.write(result, content)

    def _add(self, result: Tensor, a: Tensor, b: Any) -> None:
        old, new = self.memory.read(a), self.memory.read(b) if isinstance(b, Tensor) else []
        if any(isinstance(value, Square) for _, value in (*old, *new)):
            self.memory.write(result, [(0, _join(value for _, value in (*old, *new)))])
            return
        if result is a:
            self._require_no_backward(a, b)
        for (_, sum_), (_, piece) in zip(old, new, strict=False):
            if sum_.sums != piece.sums:
                detail = "added to a partial sum" if piece.sums else "added to a sum"
                found, expected = (REPLICATED, PARTIAL) if piece.sums else (PARTIAL, REPLICATED)
                self.faults.append(Fault(sum_.name, found, "data", expected, where(), detail))
        self.memory.write(result, old or new)

    def _scale(self, result: Any, args: Sequence[Any], sign: int) -> bool:
        """Note a multiplication of gradients with a number. Returns whether it was one."""
        sources, targets = _tensors(args[0]), _tensors(result)
        contents = [self.memory.read(tensor) for tensor in sources]
        if not any(isinstance(value, Piece) for content in contents for _, value in content):
            return False
        factors = args[1] if isinstance(args[1], list | tuple) else [args[1]] * len(sources)
        for target, source, content, factor in zip(targets, sources, contents, factors, strict=True):
            if isinstance(factor, Tensor) and factor.numel() > 1:
                self._lose(content)
                self.memory.write(target, [])
                continue
            number = float(factor) ** sign if float(factor) else 0.0
            scaled = [(i, v._replace(scale=v.scale * number)) for i, v in content if isinstance(v, Piece)]
            self._convert(target, scaled, source)
        return True

    def _other(self, name: str, function: Any, result: Any, args: Sequence[Any]) -> None:
        """Note an operation without a rule: a number of norms, or gradients that are no longer followed."""
        inputs = [tensor for arg in args for tensor in _tensors(arg)]
        contents = [(tensor, self.memory.read(tensor)) for tensor in inputs]
        squares = [value for _, content in contents for _, value in content if isinstance(value, Square)]
        if squares and name == "_local_scalar_dense":
            self.norms.append((_join(squares), where()))
        elif squares:
            for tensor in _tensors(result):
                if tensor.is_floating_point() and not self.memory.read(tensor):
                    self.memory.write(tensor, [(0, _join(squares))])
        elif any(content for _, content in contents) and (written := _written(function, args)):
            for tensor in written:
                self._require_no_backward(tensor)
                self._lose(self.memory.read(tensor))
                self.memory.write(tensor, [])

    def _lose(self, content: Content) -> None:
        for _, value in content:
            if isinstance(value, Piece):
                self.lost.setdefault(value.name, where())

    def _require_no_backward(self, tensor: Tensor, added: Any = None) -> None:
        """Note a write of a backward, except an addition of zeros while no collective is running."""
        for _, value in self.memory.read(tensor) if self.in_backward else ():
            if not isinstance(value, Piece) or value.name not in self.begun:
                continue
            if isinstance(added, Tensor) and value.name not in self.running and not bool(added.any()):
                continue
            detail = f"a backward writes to it after its reduction began at {self.begun[value.name]}"
            self.faults.append(Fault(value.name, PARTIAL, "data", REPLICATED, where(), detail))

    def _collect(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a collective, and note its group and content."""
        name = function._schema.name.partition("::")[2]
        group = next(value for value in (_process_group(arg) for arg in args) if value is not None)
        ranks = tuple(dist.get_process_group_ranks(group))
        number = self._numbers[ranks]
        self._numbers[ranks] += 1
        sources = _tensors(args[1] if name == "_reduce_scatter_base_" else args[0])
        contents = [self.memory.read(tensor) for tensor in sources]
        result = function(*args, **kwargs)
        if name not in ("allreduce_", "reduce_", "_reduce_scatter_base_"):
            for tensor in _tensors(args[0]):
                if content := self.memory.read(tensor):
                    self._lose(content)
                    self.memory.write(tensor, [])
            return result
        for tensor, content in zip(sources, contents, strict=True):
            if not content and self.in_update and tensor.numel() == 1 and tensor.is_floating_point():
                content = [(0, Square())]  # this rank counts nothing in the norm
            if not content:
                continue
            line, index = where(), len(self.events)
            self.events.append(Event(ranks, number, tuple(content), line))
            reduced = [(i, value._replace(sums=(*value.sums, index))) for i, value in content]
            for _, value in content:
                if isinstance(value, Piece):
                    self.begun.setdefault(value.name, line)
                    if name != "allreduce_" or len(args) < 5 or args[4]:
                        self.running.add(value.name)
            if name == "_reduce_scatter_base_":
                first = ranks.index(dist.get_rank()) * args[0].numel()
                reduced = _slice(reduced, first, first + args[0].numel())
                tensor = args[0]
                if dist.get_backend(group) == "gloo":
                    self._scattered.add(tensor.data_ptr())
            elif name == "reduce_" and ranks[args[3]] != dist.get_rank():
                reduced = []
            self.memory.write(tensor, reduced)
            self.norms += [(value, line) for _, value in reduced if isinstance(value, Square)]
        return result


class _Mode(TorchDispatchMode):
    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._flow.call(func, args, kwargs or {})


def _join(values: Any) -> Square:
    """Return the number that depends on pieces and numbers."""
    values = list(values)
    pieces = tuple(value for value in values if isinstance(value, Piece))
    squares = [value for value in values if isinstance(value, Square)]
    if not pieces and len(squares) == 1:
        return squares[0]
    own = tuple(piece for square in squares if not square.sums for piece in square.pieces)
    inner = tuple(one for square in squares for one in ((square,) if square.sums else square.joined))
    return Square(pieces + own, (), tuple(dict.fromkeys(inner)))


def _slice(content: Content, first: int, last: int) -> Content:
    """Return what the elements ``first`` to ``last`` - 1 contain."""
    parts: Content = []
    for element, piece in content:
        start, stop = max(element, first), min(element + piece.stop - piece.start, last)
        if start < stop:
            parts.append((start - first, piece.part(start - element, stop - element)))
    return parts


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for one in value for t in _tensors(one)] if isinstance(value, list | tuple) else []


def _written(function: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    pairs = zip(function._schema.arguments, args, strict=False)
    return [
        t for formal, arg in pairs if formal.alias_info and formal.alias_info.is_write for t in _tensors(arg)
    ]


def _process_group(value: Any) -> dist.ProcessGroup | None:
    if not isinstance(value, torch.ScriptObject) or not value._type().qualified_name().endswith(
        "ProcessGroup"
    ):
        return None
    return dist.ProcessGroup.unbox(value)


def where() -> str:
    """Return the line of the product that runs now; before it that of another package which it calls, except torch."""
    frame, other = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PRODUCT):
            line = f"ds_ext{path[len(PRODUCT) :]}:{frame.f_lineno}"
            return f"{other}, called at {line}" if other else line
        package = path.partition("site-packages/")[2]
        if (
            not other
            and package
            and not package.startswith(("torch/", "deepspeed/comm/", "deepspeed/utils/"))
        ):
            other = f"{package}:{frame.f_lineno}"
        frame = frame.f_back
    return other or "a script"
