"""Optimizer states of a rank, by parameter.

A rank holds optimizer states of *fragments*: ranges of the tensor-parallel shard of a parameter. Without ZeRO a
fragment is the whole shard. DeepSpeed's ZeRO-1 and bf16 optimizers store the range, and its offset in their flat
partition, in ``_hp_mapping`` of the parameter.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ...errors import CheckpointError
from ..deepspeed_api.names import model_groups
from ..types import Json, Optimizer, ParameterGroup, Record, Saved

MASTER = "fp32"  # DeepSpeed's name for master weights in universal checkpoints


@dataclass(frozen=True)
class Fragment:
    """Range of a parameter whose optimizer states this rank holds.

    Attributes:
        start, numel: range in the flattened shard of the parameter.
        owner: parameter of the optimizer: a flat partition, or the model's parameter.
        offset: start of the range in the states.
        shape: shape of the states.
        master: flat view of the range's master weights; None if the parameter is its own master weight.
        is_whole: the states contain all elements of the parameter, on each rank with a fragment of it.
    """

    start: int
    numel: int
    owner: Tensor
    offset: int
    shape: torch.Size
    master: Tensor | None = None
    is_whole: bool = False

    def kept(self, parameter: Tensor) -> Fragment:
        """Return the range of the states that this rank must have, of which checkpoints contain this fragment's."""
        if not self.is_whole:
            return self
        return replace(self, start=0, numel=parameter.numel(), offset=self.offset - self.start)

    def part(self, state: Tensor) -> Tensor:
        """Return a flat view of the range in a state."""
        return state.view(-1)[self.offset : self.offset + self.numel]


class OptimizerStates:
    """States of the engine's optimizer, by parameter; none if ``optimizer`` is None."""

    def __init__(self, optimizer: Optimizer) -> None:
        # DeepSpeed's ZeRO and bf16 optimizers wrap the user's optimizer.
        self.wrapper: Optimizer = optimizer if isinstance(optimizer, ZeROOptimizer) else None
        self.base: Optimizer = optimizer if self.wrapper is None else self.wrapper.optimizer

    @property
    def name(self) -> str | None:
        """Class of the optimizer, which saved states must match; None without an optimizer."""
        return None if self.base is None else type(self.base).__name__

    @property
    def partitioned(self) -> bool:
        """True if each data-parallel rank holds a part of the states."""
        return self.wrapper is not None

    def groups(self) -> list[tuple[ParameterGroup, list[nn.Parameter]]]:
        if self.base is None:
            return []
        if self.wrapper is None:
            return [(group, group["params"]) for group in self.base.param_groups]
        return list(zip(self.base.param_groups, model_groups(self.wrapper), strict=True))

    def fragments(self) -> dict[int, Fragment]:
        """Return the fragments on this rank, by ``id`` of the model parameter."""
        fragments = {}
        for index, (group, parameters) in enumerate(self.groups()):
            momentum = self._offsets_of_matrices(index)
            for parameter in parameters:
                if self.wrapper is None:
                    fragments[id(parameter)] = Fragment(0, parameter.numel(), parameter, 0, parameter.shape)
                elif (mapping := parameter._hp_mapping) is not None:  # pyright: ignore[reportAttributeAccessIssue]
                    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                    owner = group["params"][0]
                    offset, shape = high.start, owner.shape
                    if momentum:
                        offset, shape = momentum[id(parameter)] + low.start, torch.Size([momentum[None]])
                    master = mapping.hp_fragment.detach()
                    fragments[id(parameter)] = Fragment(
                        low.start, low.numel, owner, offset, shape, master, bool(momentum)
                    )
        return fragments

    def _offsets_of_matrices(self, index: int) -> dict[int | None, int]:
        """Return the offsets of the matrices of a group in the momentum of Muon by ``id``, and its size by None.

        ZeRO keeps it whole for every matrix of which the rank has a part. Empty for other groups.
        """
        zero = self.wrapper
        is_zero = isinstance(zero, DeepSpeedZeroOptimizer) and not zero.cpu_offload
        members = zero.params_in_partition[index] if is_zero else []
        if not members or not zero._is_muon_group(members):
            return {}
        ends = accumulate((parameter.numel() for parameter in members), initial=0)
        return dict(zip([*map(id, members), None], ends, strict=True))

    def read(self, fragment: Fragment) -> tuple[dict[str, Tensor], Record]:
        """Return the states of a fragment: those with a value per element as flat views, and those with one value."""
        tensors: dict[str, Tensor] = {}
        values: Record = {}
        for key, state in self.base.state.get(fragment.owner, {}).items():
            if isinstance(state, Tensor) and key != "step" and state.shape == fragment.shape:
                tensors[key] = fragment.part(state)
            elif isinstance(state, Tensor) and state.numel() == 1:
                dtype = str(state.dtype).removeprefix("torch.")
                values[key] = {"dtype": dtype, "shape": list(state.shape), "value": state.item()}
            elif state is None or isinstance(state, bool | int | float | str):
                values[key] = state
            else:
                raise CheckpointError(
                    f"optimizer: a state needs one value per element of a parameter, or a single value, to load "
                    f"with other sizes (got {key!r} of {self.name}). Use another optimizer."
                )
        return tensors, values

    def problem(self) -> str:
        """Return why the states cannot be saved; empty if they can, or if only a step would show it.

        A copy of the optimizer takes a step with small parameters of the same numbers of dimensions.
        """
        if self.base is None or any(hasattr(one, "__del__") for one in (self.base, *self._inner().values())):
            return ""  # a copy would end the optimizer
        probe = self._make_probe()
        try:
            type(probe).step(probe)  # the object's may be a scheduler's, of the optimizer itself
        except Exception:
            return ""
        try:
            for group in probe.param_groups:
                for parameter in group["params"]:
                    OptimizerStates(probe).read(Fragment(0, 0, parameter, 0, parameter.shape))
        except CheckpointError as error:
            return str(error)
        return ""

    def _inner(self) -> dict[str, torch.optim.Optimizer]:
        return {key: one for key, one in vars(self.base).items() if isinstance(one, torch.optim.Optimizer)}

    def _make_probe(self) -> Optimizer:
        """Return a copy of the optimizer, and of those that it contains, without states and hooks.

        Its groups have a small parameter, with gradient, for each number of dimensions of the original ones. All sizes
        of a parameter differ, so that a state with other sizes is noticed.
        """
        probe = _copy_empty(self.base)
        probe.__dict__ |= {key: _copy_empty(inner) for key, inner in self._inner().items()}
        for group in self.base.param_groups:
            examples = {parameter.dim(): parameter for parameter in group["params"]}
            small = [p.new_zeros([*range(2, 2 + dim)]).requires_grad_() for dim, p in examples.items()]
            for parameter in small:
                parameter.grad = torch.zeros_like(parameter)
            probe.param_groups.append({**group, "params": small})
        return probe

    def clear(self) -> None:
        if self.base is not None:
            self.base.state.clear()
        if self.wrapper is not None:
            self.wrapper._hp_optimizer_states_linked = False

    def write(self, fragment: Fragment, tensors: Mapping[str, Tensor], values: Json) -> None:
        """Set the states of a fragment. Other elements of a new state are zero."""
        if not tensors and not values:
            return
        state = self.base.state[fragment.owner]
        for key, tensor in tensors.items():
            if key not in state:
                state[key] = fragment.owner.detach().new_zeros(fragment.shape)
            fragment.part(state[key]).copy_(tensor)
        for key, value in values.items():
            state[key] = self._value(fragment, value)

    def _value(self, fragment: Fragment, value: Saved) -> Saved:
        """Return a state with one value from its description in :meth:`read`."""
        if not isinstance(value, dict):
            return value
        group = next(g for g in self.base.param_groups if any(p is fragment.owner for p in g["params"]))
        # Otherwise torch keeps single values on the host.
        on_device = group.get("capturable") or group.get("fused")
        device = fragment.owner.device if on_device else "cpu"
        return torch.full(value["shape"], value["value"], dtype=getattr(torch, value["dtype"]), device=device)

    def weights_changed(self) -> None:
        """Copy the master weights to the model. All data-parallel ranks must call this together."""
        if self.wrapper is not None:
            self.wrapper.update_lp_params()


def _copy_empty(optimizer: Optimizer) -> Optimizer:
    empty = object.__new__(type(optimizer))
    hooks = {key: OrderedDict() for key in vars(optimizer) if key.endswith("_hooks")}
    empty.__dict__ |= {**vars(optimizer), **hooks, "state": defaultdict(dict), "param_groups": []}
    return empty


def numbers_of(group: Json) -> Record:
    """Return the numeric settings of a parameter group (lr, betas, ...)."""

    def number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    numbers = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if number(value):
            numbers[key] = value
        elif isinstance(value, list | tuple) and value and all(map(number, value)):
            numbers[key] = list(value)
    return numbers


def group_settings(group: Json) -> Record:
    """Return the plain settings of a parameter group: numbers, switches (True, False, None) and texts."""
    plain = {key: value for key, value in group.items() if value is None or isinstance(value, bool | str)}
    return plain | numbers_of(group)


def set_numbers(group: ParameterGroup, numbers: Json) -> None:
    """Set the settings of a parameter group, as returned by :func:`numbers_of` or :func:`group_settings`."""
    for key, value in numbers.items():
        present = group.get(key)
        if isinstance(present, Tensor):
            present.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(present, tuple) else value
