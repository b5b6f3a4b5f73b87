"""Base of what a job's script does around its steps, on the ranks and in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .job import Job
    from .reference import Result

AT_START = -1  # before the optimizer is made


class Side(ABC):
    """Object of the actions: an engine, or a model and torch's optimizer in one process.

    Attributes:
        job: the job.
        part: index of the layout in ``job.layouts``.
        result: results so far.
        modules: layers by index in the model; those of this rank.
        whole: module with all layers.
        optimizer: DeepSpeed's or torch's; None before it is made, and on a rank without one.
        memory: what actions keep, by any key.
    """

    job: Job
    part: int
    result: Result
    modules: dict[int, nn.Module]
    whole: nn.Module
    optimizer: Any
    memory: dict[Any, Any]

    @abstractmethod
    def settle(self) -> None:
        """Wait until the weights may be read and set."""

    @abstractmethod
    def eval_mode(self) -> None:
        """Set evaluation mode, as a script does before an evaluation. The next step trains in training mode."""

    @abstractmethod
    def evaluate(self, sizes: Any) -> None:
        """Evaluate other data with the sizes of an action, and store the loss and the outputs."""

    @abstractmethod
    def resize(self, micro_batches: int) -> None:
        """Change the number of micro-batches per step, over all data-parallel ranks."""

    @abstractmethod
    def keep_rates(self) -> None:
        """Set another scheduler, which does not change the learning rates."""

    def chosen(self, layers: Iterable[int]) -> list[nn.Module]:
        """Return those of the layers that exist here, each module once."""
        modules = [self.modules[index] for index in layers if index in self.modules]
        return list({id(module): module for module in modules}.values())

    def parameters(self, layers: Iterable[int]) -> list[nn.Parameter]:
        """Return the parameters of those of the layers that exist here, each once."""
        parameters = [p for module in self.chosen(layers) for p in module.parameters()]
        return list({id(p): p for p in parameters}.values())

    @property
    def weights(self) -> list[nn.Parameter]:
        """All parameters, each once. They may be read and set."""
        self.settle()
        return self.parameters(self.modules)


class KeptRates:
    """Scheduler that does not change the learning rates."""

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Action(ABC):
    """Action of the script before one step, or before several.

    Attributes:
        step: steps before it; AT_START: it happens before the optimizer is made.
    """

    step: int

    repeats: ClassVar[bool] = True  # a script that resumes does it again, before it loads
    needs_all_parameters: ClassVar[bool] = False  # the script gives the optimizer frozen parameters too

    @abstractmethod
    def act(self, side: Side) -> None:
        """Do it."""

    @classmethod
    @abstractmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        """Draw one for a job; None if the job does not fit."""

    def at_start(self, side: Side) -> None:
        """Do what comes before the optimizer is made."""
        if self.step == AT_START:
            self.act(side)

    def before_step(self, side: Side, step: int) -> None:
        """Do what comes before a step; ``job.steps``: after the last one."""
        if step == self.step:
            self.act(side)

    def after_step(self, side: Side, step: int) -> None:  # noqa: B027
        """Do what comes after a step."""

    def before_save(self, side: Side) -> None:  # noqa: B027
        """Do what comes before the save in the first layout."""

    def again(self, side: Side) -> None:
        """Do it in the script that resumes, before it loads the checkpoint."""
        if self.repeats and self.step != AT_START:
            self.act(side)

    def smaller(self) -> Iterator[Action]:
        """Yield smaller actions, for a smaller job: of one layer, and one step earlier."""
        for layer in getattr(self, "layers", ()) if len(getattr(self, "layers", ())) > 1 else ():
            yield replace(self, layers=(layer,))  # pyright: ignore[reportCallIssue]
        if self.step > 0:
            yield replace(self, step=self.step - 1)

    def refuses(self, job: Job, key: str) -> bool:
        """Return whether a job may be refused for this action, with an error of this key."""
        return False

    def fits(self, job: Job) -> bool:
        """Return whether the results of a job with this action depend on the action only."""
        return self.step <= job.steps


def changed(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with its floating-point tensors changed by a function."""
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() or value.is_complex() else value
    if isinstance(value, tuple | list):
        return type(value)(changed(part, function) for part in value)
    return value


@torch.no_grad()
def set_weights(parameters: Iterable[nn.Parameter], values: Iterable[Tensor]) -> None:
    """Copy values into parameters."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
