"""Interface of a stage to the executor. Kinds of stages: :mod:`.body`, :mod:`.head`."""

from __future__ import annotations

from torch import Tensor

from ..step import Step
from .buffer import Buffer


class Stage:
    """Stage of a pipe on this rank: it computes on the buffers of live slices, which it is given.

    Messages name their two stages. ``outputs_for`` and ``accept_activations`` are the two ends of a message of
    activations, ``grads_for`` and ``accept_grads`` those of a message of gradients. A kind has the methods of its ops
    and messages: no program calls another one (:mod:`ds_ext.pipe_schedules.checks`).
    """

    def start_step(self) -> None:
        """Forget the slices of a step that failed."""

    def load(self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int) -> None:
        """Take inputs and labels of a slice from the data; ``slice_index`` counts the slices of its micro-batch."""
        raise NotImplementedError

    def forward(self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int) -> None:
        raise NotImplementedError

    def backward(self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int) -> None:
        raise NotImplementedError

    def outputs_for(self, target: int, step: Step, buffer: Buffer, item: int) -> tuple[Tensor, ...]:
        """Return what stage ``target`` gets of the forward; ``item`` is the number of the slice in the step."""
        raise NotImplementedError

    def accept_activations(self, source: int, buffer: Buffer, tensors: tuple[Tensor, ...]) -> None:
        """Take what stage ``source`` passes on."""
        raise NotImplementedError

    def grads_for(self, target: int, buffer: Buffer) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def accept_grads(self, source: int, buffer: Buffer, grads: tuple[Tensor, ...]) -> None:
        raise NotImplementedError
