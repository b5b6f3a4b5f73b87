"""Which samples a micro-batch holds, for any schedule, on any rank.

Step t takes the samples t*G .. t*G+G-1 of the dataset's own (seeded, shuffled) order, and micro-batch j of
the step holds the consecutive samples j*b .. j*b+b-1 of them. G is the global batch, b the micro-batch size.
There is no iterator: a rank asks for a micro-batch by its id whenever its schedule wants it, as often as it
wants it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ds_ext.errors import ConfigError


class MapDataset(Protocol):
    """What `MicroBatches` needs of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def stack_samples(samples: Sequence[Any]) -> Any:
    """Stack tensors in a new first dimension, in tuples, lists and dictionaries; numbers become tensors.

    Raises ConfigError for samples that differ in shape or are neither of these.
    """
    first = samples[0]
    if isinstance(first, torch.Tensor):
        shapes = sorted({tuple(sample.shape) for sample in samples})
        if len(shapes) > 1:
            raise ConfigError(
                f"training_data: the samples of a micro-batch must have one shape (got "
                f"{' and '.join(map(str, shapes))}). Give initialize() a collate_fn that pads them and returns "
                f"(inputs, labels)."
            )
        return torch.stack(list(samples))
    if isinstance(first, Mapping):
        return {key: stack_samples([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        stacked = [stack_samples(parts) for parts in zip(*samples, strict=True)]
        return stacked if isinstance(first, list) else tuple(stacked)
    try:
        return torch.as_tensor(samples)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"training_data: samples must hold tensors or numbers (got {type(first).__name__}). Give initialize() a "
            f"collate_fn that returns (inputs, labels) as tensors."
        ) from None


class MicroBatches:
    """Micro-batches of the current step by id, and the position that a checkpoint keeps.

    Args:
        dataset: samples by index, in the order in which they are to be seen.
        micro_batch_size: b, samples of one micro-batch.
        consumed_samples: samples of all steps that are done; the position.
        collate: list of samples to a batch; by default tensors are stacked in a new first dimension.
        repeat: begin again at sample 0 after the last one instead of refusing.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        dataset: MapDataset,
        micro_batch_size: int,
        consumed_samples: int = 0,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        repeat: bool = False,
    ) -> None:
        if micro_batch_size < 1 or consumed_samples < 0:
            raise ConfigError(
                "micro_batch_size must be at least 1, consumed_samples at least 0; got "
                f"{micro_batch_size} and {consumed_samples}."
            )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.consumed_samples = consumed_samples
        self.repeat = repeat
        self._collate = collate or stack_samples

    def get(self, micro_batch: int) -> Any:
        """The collated micro-batch with that global id of the current step.

        For `GPTDataset` that is (inputs_BS, labels_BS), int64.

        Raises:
            ConfigError: the dataset ends before that micro-batch does.
        """
        first = self.consumed_samples + micro_batch * self.micro_batch_size
        indices = range(first, first + self.micro_batch_size)
        length = len(self.dataset)
        if (not self.repeat and indices.stop > length) or length == 0:
            raise ConfigError(
                f"the dataset has {length} samples, micro-batch {micro_batch} of this step needs samples {first} "
                f"to {indices[-1]} ({self.consumed_samples} are consumed). Train fewer steps, use a smaller batch, "
                f"or give more data."
            )
        return self._collate([self.dataset[index % length] for index in indices])

    def advance(self, micro_batches: int) -> None:
        """The current step is done; it had that many micro-batches over the whole data-parallel world."""
        self.consumed_samples += micro_batches * self.micro_batch_size

    def state_dict(self) -> dict[str, int]:
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved position; the batch sizes may differ from those of the saving run."""
        consumed_samples = state["consumed_samples"]
        if consumed_samples < 0:
            raise ConfigError(f"consumed_samples must be at least 0; the saved state has {consumed_samples}")
        self.consumed_samples = consumed_samples
