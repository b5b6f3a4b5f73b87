"""Order of samples in micro-batches, their position in checkpoints, and collation."""

import ast
import re
from typing import Any

import pytest
import torch

from ds_ext.engine.batches import MicroBatches, require_pair, require_tensors, stack_samples
from ds_ext.errors import ConfigError


class Numbers:
    """Dataset with the samples (i, -i)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([index]), torch.tensor([-index])


def first(batch: Any) -> list[int]:
    return batch[0].flatten().tolist()


def test_micro_batch_j_of_step_t_holds_consecutive_samples() -> None:
    batches = MicroBatches(Numbers(100), micro_batch_size=3)
    for step in range(3):
        for j in range(4):
            start = step * 12 + j * 3
            inputs, labels = batches.get(j)
            assert inputs.shape == (3, 1)
            assert inputs.flatten().tolist() == [start, start + 1, start + 2]
            assert torch.equal(labels, -inputs)
        batches.advance(4)
    assert batches.consumed_samples == 36


def test_micro_batches_do_not_depend_on_the_order_of_access() -> None:
    batches = MicroBatches(Numbers(24), 2)
    forward = [first(batches.get(j)) for j in range(4)]
    assert [first(batches.get(j)) for j in (3, 0, 3, 2)] == [forward[j] for j in (3, 0, 3, 2)]


def test_samples_of_a_step_do_not_depend_on_the_micro_batch_size() -> None:
    coarse, fine = MicroBatches(Numbers(24), 4), MicroBatches(Numbers(24), 1)
    coarse.advance(2)
    fine.advance(8)
    assert [first(fine.get(j))[0] for j in range(8)] == first(coarse.get(0)) + first(coarse.get(1))


def test_position_is_saved_and_restored_with_another_batch_size() -> None:
    batches = MicroBatches(Numbers(100), 2)
    batches.advance(4)
    state = batches.state_dict()
    assert state == {"consumed_samples": 8}
    resumed = MicroBatches(Numbers(100), 5)
    resumed.load_state_dict(state)
    assert first(resumed.get(0)) == [8, 9, 10, 11, 12]


def test_a_dataset_that_is_too_short() -> None:
    batches = MicroBatches(Numbers(20), 2)
    batches.advance(8)
    assert first(batches.get(1)) == [18, 19]
    with pytest.raises(ConfigError, match=r"micro-batch 2 .* samples 20 to 21, after 16 .*got 20 samples"):
        batches.get(2)


def test_a_repeating_dataset_continues_at_sample_0() -> None:
    batches = MicroBatches(Numbers(5), 2, repeat=True)
    assert [first(batches.get(j)) for j in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    with pytest.raises(ConfigError, match="0 samples"):
        MicroBatches(Numbers(0), 2, repeat=True).get(0)


@pytest.mark.parametrize(("size", "consumed"), [(0, 0), (2, -1)])
def test_numbers_out_of_range(size: int, consumed: int) -> None:
    with pytest.raises(ConfigError, match=f"got {size} and {consumed}"):
        MicroBatches(Numbers(100), size, consumed)


def test_negative_saved_position() -> None:
    with pytest.raises(ConfigError, match="-8"):
        MicroBatches(Numbers(100), 2).load_state_dict({"consumed_samples": -8})


def test_nested_samples_are_stacked() -> None:
    samples = [{"ids": torch.full((3,), i), "pair": (torch.tensor(i), [float(i)])} for i in range(2)]
    batch = stack_samples(samples)
    assert batch["ids"].shape == (2, 3)
    assert batch["pair"][0].tolist() == [0, 1]
    assert batch["pair"][1][0].tolist() == [0.0, 1.0]


def test_collate_can_be_replaced() -> None:
    batches = MicroBatches(Numbers(8), 2, collate=lambda samples: [int(sample[0]) for sample in samples])
    assert batches.get(1) == [2, 3]


def test_other_values_become_lists() -> None:
    assert stack_samples(["a", "b"]) == ["a", "b"]
    inputs, labels = stack_samples([(torch.zeros(2), None), (torch.zeros(2), None)])
    assert inputs.shape == (2, 2) and labels == [None, None]


def test_every_pass_has_another_order_of_all_samples() -> None:
    seeds = [7]
    batches = MicroBatches(Numbers(5), 3, repeat=True)
    batches.shuffle_seed = lambda: seeds[0]
    orders = [[number for j in range(5) for number in first(batches.get(j))]]
    assert [sorted(orders[0][start : start + 5]) for start in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(orders[0][start : start + 5]) for start in (0, 5, 10)}) > 1
    assert [number for j in reversed(range(5)) for number in reversed(first(batches.get(j)))] == orders[0][
        ::-1
    ]
    batches.advance(2)  # the position, not the order of access, decides
    assert first(batches.get(0)) == orders[0][6:9]
    seeds[0], batches.consumed_samples = 8, 0
    assert [number for j in range(5) for number in first(batches.get(j))] != orders[0]


def test_a_whole_set_ends_with_a_smaller_micro_batch_and_empty_ones() -> None:
    batches = MicroBatches(Numbers(8), 3, whole=True)
    batches.require(4, trains=False)
    assert [first(batches.get(j)) for j in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [7]]
    assert [batches.weight(j) for j in range(4)] == [3, 3, 2, 0]
    assert MicroBatches(Numbers(8), 3).weight(0) == 1


def test_too_few_samples_are_left() -> None:
    batches = MicroBatches(Numbers(20), 2)
    batches.require(10, trains=True)
    batches.advance(8)
    with pytest.raises(ConfigError, match=r"needs 6 samples, .*got 4 of 20\b.* 16 "):
        batches.require(3, trains=True)
    batches.advance(4)  # loaded from a job that repeats
    with pytest.raises(ConfigError, match=r"got 0 of 20\b.* 24 "):
        batches.require(1, trains=True)
    batches.repeat = True
    batches.require(3, trains=True)


def test_samples_of_different_shapes() -> None:
    with pytest.raises(ConfigError, match=r"\(3,\) and \(4,\)"):
        stack_samples([torch.zeros(3), torch.zeros(4)])


def advised_keys(text: str) -> Any:
    """Keys in the pair that an error tells to build of the samples; None if it names none."""
    pair = re.search(r"returns (.*) over the samples", text)
    return pair and ast.literal_eval(re.sub(r"stack of s\[('\w+')\]", r"\1", pair[1]))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["input_ids", "attention_mask", "labels"], (("input_ids", "attention_mask"), "labels")),
        (["label", "pixel_values"], ("pixel_values", "label")),
        (["x", "y"], ("x", "y")),
        (["source_ids", "Target_ids", "label_ids"], ("source_ids", ("Target_ids", "label_ids"))),
        (["input_ids", "attention_mask"], None),
        (["labels"], None),
    ],
)
def test_the_advice_for_samples_with_keys_has_their_labels_as_labels(keys: list[str], expected: Any) -> None:
    batches = MicroBatches([dict.fromkeys(keys, torch.ones(4))], 1)
    with pytest.raises(ConfigError) as caught:
        require_pair(batches.get(0), batches)
    assert advised_keys(str(caught.value)) == expected


def test_a_part_with_keys_is_not_divided_again() -> None:
    with pytest.raises(ConfigError, match="collate_fn") as caught:
        require_tensors(
            dict.fromkeys(("ids", "labels"), torch.ones(4)), "inputs", MicroBatches(Numbers(1), 1)
        )
    assert advised_keys(str(caught.value)) is None
