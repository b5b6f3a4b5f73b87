"""Where an engine gets a micro-batch: by its global id, never by calling next() at compute time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import ConfigError


@runtime_checkable
class Batches(Protocol):
    """Micro-batches of a step, addressed by global id (0..N*DP-1 over all pipeline groups)."""

    def get(self, micro_batch: int) -> Any:
        """The (inputs, labels) of a micro-batch of the current step."""
        ...

    def advance(self, micro_batches: int) -> None:
        """The current step is done; it had that many micro-batches over all pipeline groups."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """Batches whose position the engine's checkpoints keep.

    Micro-batches have global ids, so the state is the same on all ranks: numbers, texts, tensors, lists, dictionaries.
    """

    def state_dict(self) -> dict[str, Any]:
        """The position between two steps."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Go on from a position, also in a job with another batch size."""
        ...


class IteratorBatches:
    """A user's iterator as Batches: it yields the micro-batches of this data-parallel rank in order.

    A step takes ``gradient_accumulation_steps`` of them, as in DeepSpeed; the two pipes of a bidirectional schedule
    are two data-parallel ranks. Ranks ask in the order of their schedule, so what is pulled early is kept until
    its turn. Only ranks that hold a first or a last stage pull at all.

    Args:
        iterator: yields (inputs, labels).
        data_parallel_rank: DeepSpeed's, replicas included.
        count: micro-batches of this data-parallel rank per step.
    """

    def __init__(self, iterator: Iterator[Any], data_parallel_rank: int, count: int) -> None:
        self.iterator, self.rank, self.count = iterator, data_parallel_rank, count
        self._pulled: list[Any] = []

    def get(self, micro_batch: int) -> Any:
        """Pull up to ``micro_batch``. Raises ConfigError when the data ends early or belongs to another rank."""
        owner, index = divmod(micro_batch, self.count)
        if owner != self.rank:
            raise ConfigError(
                f"data_iter yields the micro-batches of data-parallel rank {self.rank}, and this schedule needs one "
                f"of rank {owner} here too (inputs of one pipe, labels of the other). Give training_data to "
                f"initialize(), or train_batch() an object with get(micro_batch) and advance(micro_batches)."
            )
        while len(self._pulled) <= index:
            try:
                # As DeepSpeed does with inputs: the iterator may fill the same memory again.
                self._pulled.append(tree_map_only(Tensor, _own, next(self.iterator)))
            except StopIteration:
                raise ConfigError(
                    f"data_iter ended after {len(self._pulled)} micro-batches of this step; a step takes {self.count} "
                    f"(gradient_accumulation_steps) per data-parallel rank. Wrap it in "
                    f"deepspeed.utils.RepeatingLoader, or stop one step earlier."
                ) from None
        return self._pulled[index]

    def advance(self, micro_batches: int) -> None:
        """Drop this step's micro-batches."""
        self._pulled.clear()


def _own(tensor: Tensor) -> Tensor:
    """A copy, but of what a loader has made for this once: it travels to the GPU as it is, or is there."""
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.clone()
