"""Completion of DeepSpeed's batch keys, and errors for keys that contradict each other."""

from __future__ import annotations

import pytest

from ds_ext.config.batch_sizes import BatchSizes, batch_sizes
from ds_ext.errors import ConfigError


@pytest.mark.parametrize(
    ("train", "micro", "steps", "expected"),
    [
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


@pytest.mark.parametrize(
    ("train", "micro", "steps", "numbers"),
    [
        (48, 4, 4, "32.*48.*32.* gradient_accumulation_steps .*6"),
        (50, 4, 4, r"32.*50.*32\.$"),
        (50, 4, None, r"8.*50.*48 .*56\.$"),
        (0, 4, 4, "0"),
    ],
)
def test_errors_name_the_flag_that_set_a_key(train: int, micro: int, steps: int | None, numbers: str) -> None:
    flags = {"train_batch_size": f"--global-batch-size {train}"}
    with pytest.raises(ConfigError, match=f"^--global-batch-size: .*{numbers}"):
        batch_sizes(batch(train, micro, steps), 2, 1, flags)


def test_one_pipe_counts_its_groups() -> None:
    for steps in (3, None):
        sizes = batch_sizes(batch(None, 2, steps), replicas=1, data_parallel_size=2)
        assert sizes == BatchSizes(2, steps or 1, replicas=1, data_parallel_size=2)


def test_errors_name_the_flag_of_a_factor() -> None:
    flags = {"train_micro_batch_size_per_gpu": "--micro-batch-size 4"}
    with pytest.raises(ConfigError, match=r"^train_batch_size: .*4 .--micro-batch-size.*gradient_acc"):
        batch_sizes(batch(48, 4, 4), 2, 1, flags)


def batch(train: object, micro: object, steps: object) -> dict[str, object]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {key: value for key, value in zip(keys, (train, micro, steps), strict=True) if value is not None}


@pytest.mark.parametrize(
    ("train", "micro", "steps", "key_and_numbers"),
    [
        (
            None,
            None,
            None,
            "^train_batch_size: .*train_micro_batch_size_per_gpu .*gradient_accumulation_steps",
        ),
        (None, None, 3, "^train_batch_size: .*train_micro_batch_size_per_gpu .*gradient_accumulation_steps"),
        (10, 2, 3, "^train_batch_size: .*24 = 2 .* x 3 .* x 4 .*10.*24"),
        (10, 2, None, "^train_batch_size: .*8 = 2 .* x 4 .*10.*8 .*16"),
        (3, None, 2, r"^train_batch_size: .*8 = 2 .* x 4 .*3.* 8\.$"),
        (0, 1, 1, "^train_batch_size: .*0"),
        (8, "auto", 1, "^train_micro_batch_size_per_gpu: .*'auto'"),
        (8, 1, True, "^gradient_accumulation_steps: .*True"),
    ],
)
def test_batch_sizes_that_do_not_fit(
    train: object, micro: object, steps: object, key_and_numbers: str
) -> None:
    with pytest.raises(ConfigError, match=key_and_numbers):
        batch_sizes(batch(train, micro, steps), replicas=2, data_parallel_size=2)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train_microbatch_size_per_gpu", "train_micro_batch_size_per_gpu"),
        ("Train_batch_size", "train_batch_size"),
        ("gradient_accumulation_step", "gradient_accumulation_steps"),
    ],
)
def test_a_misspelled_key_is_found_before_the_sizes_are_checked(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .*got 7.*{meant}"):
        batch_sizes({"train_batch_size": 60, key: 7}, 2, 1)
