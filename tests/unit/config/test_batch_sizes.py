"""DeepSpeed's batch keys: completed as DeepSpeed does, contradictions explained."""

from __future__ import annotations

import pytest

from ds_ext.config.batch_sizes import BatchSizes, batch_sizes
from ds_ext.errors import ConfigError


@pytest.mark.parametrize(
    ("train", "micro", "steps", "expected"),
    [
        (None, 2, 3, (2, 3)),
        (None, 2, None, (2, 1)),
        (24, 2, 3, (2, 3)),
        (24, 2, None, (2, 3)),
        (24, None, 3, (2, 3)),
        (24, None, None, (6, 1)),
    ],
)
def test_batch_sizes_are_completed(
    train: int | None, micro: int | None, steps: int | None, expected: tuple[int, int]
) -> None:
    sizes = batch_sizes(batch(train, micro, steps), replicas=2, data_parallel_size=2)
    assert sizes == BatchSizes(*expected, replicas=2, data_parallel_size=2)
    assert sizes.micro_batches == 2 * expected[1]
    assert sizes.train_batch_size == 4 * expected[0] * expected[1]


def test_batch_sizes_that_came_from_flags_are_named_as_such() -> None:
    flags = {"train_batch_size": "--global-batch-size 48"}
    with pytest.raises(ConfigError) as error:
        batch_sizes(batch(48, 4, 4), 2, 1, flags)
    assert str(error.value) == (
        "--global-batch-size 48, train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 4 and 2 data-parallel "
        "ranks (2 replicas x 1) contradict each other: 4 x 4 x 2 = 32. Leave --global-batch-size out or set it to 32, "
        "or set gradient_accumulation_steps to 6 (48 = 4 x 6 x 2)."
    )
    with pytest.raises(
        ConfigError, match=r"4 x 4 x 2 = 32. Leave --global-batch-size out or set it to 32\.$"
    ):
        batch_sizes(batch(50, 4, 4), 2, 1, flags)
    with pytest.raises(ConfigError, match=r"50 is not a multiple of 8. Use --global-batch-size 48 or 56\.$"):
        batch_sizes(batch(50, 4, None), 2, 1, flags)
    with pytest.raises(ConfigError, match=r"--global-batch-size must be a positive integer; got 0"):
        batch_sizes(batch(0, 4, 4), 2, 1, flags)
    micro = {"train_micro_batch_size_per_gpu": "--micro-batch-size 4"}
    with pytest.raises(ConfigError, match=r"train_batch_size 48, --micro-batch-size 4, gradient_acc"):
        batch_sizes(batch(48, 4, 4), 2, 1, micro)


def batch(train: object, micro: object, steps: object) -> dict[str, object]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {key: value for key, value in zip(keys, (train, micro, steps), strict=True) if value is not None}


@pytest.mark.parametrize(
    ("train", "micro", "steps", "sentence"),
    [
        (None, None, None, 'Give "train_micro_batch_size_per_gpu"'),
        (None, None, 3, 'Give "train_micro_batch_size_per_gpu"'),
        (10, 2, 3, r"train_batch_size 10, .* contradict each other: 2 x 3 x 4 = 24. .* set it to 24"),
        (
            10,
            2,
            None,
            r"gradient_accumulation_steps unset .* 10 is not a multiple of 8. Use train_batch_size 8 or 16",
        ),
        (3, None, 2, r"3 is not a multiple of 8. Use train_batch_size 8\."),
        (0, 1, 1, '"train_batch_size" must be a positive integer; got 0'),
        (8, "auto", 1, "\"train_micro_batch_size_per_gpu\" must be a positive integer; got 'auto'"),
        (8, 1, True, '"gradient_accumulation_steps" must be a positive integer; got True'),
    ],
)
def test_batch_sizes_that_do_not_fit(train: object, micro: object, steps: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        batch_sizes(batch(train, micro, steps), replicas=2, data_parallel_size=2)
