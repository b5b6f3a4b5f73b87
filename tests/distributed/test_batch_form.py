"""Data of another form than (inputs, labels), or of another precision than the model, is one error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.errors import ConfigError, TransportError
from tests.plans import batch_of
from tests.precisions import needs
from tests.ranks import RankPool, Ranks

WIDTH = 4


def config(schedule: str = "1f1b", **sections: Any) -> dict[str, Any]:
    section = {"schedule": schedule, "pipeline_parallel_size": 2, "transport_options": {"timeout_s": 20}}
    return {
        **batch_of(schedule, 4 if schedule == "1f1b" else 2),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **sections,
        "ds_ext": section,
    }


def build(
    training_data: Any = None, loss_fn: Any = nn.functional.mse_loss, schedule: str = "1f1b", **sections: Any
) -> Any:
    settings = config(schedule, **sections)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    model = ds_ext.PipelineModule(layers, settings, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = ds_ext.initialize(
        model=model, config=settings, model_parameters=model.parameters(), training_data=training_data
    )
    return engine


class Samples(torch.utils.data.Dataset[Any]):
    """Samples of one form."""

    def __init__(self, form: str) -> None:
        self.form = form

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return sample(self.form)


def sample(form: str) -> Any:
    x = torch.ones(WIDTH)
    forms: dict[str, Any] = {
        "dict": {"ids": x, "labels": x},
        "three": (x, x, x),
        "tensor": x,
        "string": "ab",
        "nested": ({"ids": x}, x),
        "pair": (x, x),
        "list": [x, x],
    }
    return forms[form]


def batch(form: str) -> Any:
    """A micro-batch of two samples; as one tensor it has two rows."""
    x = torch.ones(2, WIDTH)
    forms: dict[str, Any] = {
        "dict": {"ids": x, "labels": x},
        "three": (x, x, x),
        "tensor": x,
        "string": "ab",
        "nested": ({"ids": x}, x),
        "pair": (x, x),
        "list": [x, x],
    }
    return forms[form]


def error_of(action: Callable[[], Any]) -> tuple[str, str]:
    """(type, text) of what ``action`` raises; ("", "") when it succeeds."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def form_errors(rank: int, form: str, schedule: str) -> list[tuple[str, str]]:
    """Errors of a step by a data set, of one by an iterator, and of an evaluation."""
    found = []
    engine = build(Samples(form), schedule=schedule)
    found.append(error_of(engine.train_batch))
    engine.transport.close()
    for name in ("train_batch", "eval_batch"):
        engine = build(schedule=schedule)
        found.append(error_of(lambda name=name, engine=engine: getattr(engine, name)(endless(form))))
        engine.transport.close()
    return found


def endless(form: str) -> Iterator[Any]:
    while True:
        yield batch(form)


NAMED = {
    "dict": "'ids', 'labels'",
    "three": "of 3",
    "tensor": "one tensor of shape (2, 4)",
    "string": "str",
    "nested": "dict",
}


@pytest.mark.parametrize("form", NAMED)
def test_another_form_is_one_error_on_all_ranks(ranks2: RankPool, form: str) -> None:
    first, second = ranks2.run(form_errors, form, "1f1b")
    assert first == second
    assert [kind for kind, _ in first] == ["ConfigError"] * 3
    for (_, text), key in zip(first, ("training_data", "data_iter", "data_iter"), strict=True):
        assert text.startswith(f"{key}: ") and "collate_fn" in text and NAMED[form] in text


@pytest.mark.parametrize("form", ["pair", "list"])
def test_tuples_and_lists_of_two_train(ranks2: RankPool, form: str) -> None:
    for found in ranks2.run(form_errors, form, "1f1b"):
        assert found == [("", "")] * 3


def train_after_refusals(rank: int) -> tuple[list[str], float]:
    engine = build()
    kinds = [error_of(lambda: engine.train_batch(iter([batch("nested")] * 4)))[0] for _ in range(2)]
    return kinds, float(engine.train_batch(iter([batch("pair")] * 4)))


def test_a_refused_batch_is_checked_again(ranks2: RankPool) -> None:
    """Also on ranks that have read it."""
    for kinds, loss in ranks2.run(train_after_refusals):
        assert kinds == ["ConfigError"] * 2 and loss > 0


def test_on_a_folded_placement(ranks2: RankPool) -> None:
    first, second = ranks2.run(form_errors, "tensor", "bitpipe")
    assert first == second and {kind for kind, _ in first} == {"ConfigError"}


def change_form(rank: int) -> tuple[str, str]:
    """The second step's micro-batches are tensors of two rows."""
    engine = build()
    batches = iter([batch("pair")] * 5 + [batch("tensor")] * 3)
    engine.train_batch(batches)
    return error_of(lambda: engine.train_batch(batches))


def test_a_later_batch_of_another_form_is_an_error(ranks: Ranks) -> None:
    pool = ranks(2)
    found = pool.run(change_form)
    pool.close()  # messages are left half-way
    assert ("ConfigError", True) in [(kind, "one tensor of shape (2, 4)" in text) for kind, text in found]
    assert all(kind in ("ConfigError", "PeerGone", TransportError.__name__) for kind, _ in found)


class Total(nn.Module):
    """Last layer that returns the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Labelled(Samples):
    """Samples with a label of one kind."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((WIDTH,), 1.0 + index), LABELS[self.form]


LABELS: dict[str, Any] = {
    "number": 0, "text": "cat", "none": None, "dict": {"name": "cat"}, "nested": (torch.ones(2), "cat"),
}  # fmt: skip


def train_with_unused_labels(rank: int, form: str, schedule: str) -> list[float]:
    """Losses of a step by a dataset and by an iterator, and of an evaluation by each, all of the same samples."""
    settings, losses = config(schedule), []
    for data in (Labelled(form), None):
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(3)] + [Total()]
        model = ds_ext.PipelineModule(layers, settings, partition_method="uniform")
        engine, *_ = ds_ext.initialize(
            model=model, config=settings, model_parameters=model.parameters(), training_data=data
        )
        count, samples = engine.micro_batches, Labelled(form)
        first = 2 * count * engine.grid.get_data_parallel_rank()
        inputs = [
            torch.stack([samples[first + 2 * n][0], samples[first + 2 * n + 1][0]]) for n in range(count)
        ]
        pairs = [(x, LABELS[form]) for x in inputs]
        losses.append(float(engine.eval_batch(iter(pairs) if data is None else data)))
        losses.append(float(engine.train_batch() if data is not None else engine.train_batch(iter(pairs))))
        engine.transport.close()
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe"])
@pytest.mark.parametrize("form", LABELS)
def test_labels_that_no_loss_uses_may_be_anything(ranks2: RankPool, form: str, schedule: str) -> None:
    for losses in ranks2.run(train_with_unused_labels, form, schedule):
        assert len(set(losses)) == 1 and losses[0] > 0


def outputs_without_labels(rank: int) -> Any:
    return build().eval_batch(Labelled("text"), compute_loss=False)


def test_an_evaluation_without_a_loss_uses_no_labels(ranks2: RankPool) -> None:
    first, last = ranks2.run(outputs_without_labels)
    assert first is None and last.shape == (2, WIDTH)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples in order only."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield sample("pair")


class Unsized:
    """Samples by index, without a length."""

    def __getitem__(self, index: int) -> Any:
        return sample("pair")


def refused_sets(rank: int) -> list[tuple[str, str]]:
    loader = torch.utils.data.DataLoader(Samples("pair"), batch_size=2)
    return [error_of(lambda data=data: build(data)) for data in (Stream(), Unsized(), loader)]


def test_data_without_an_index_is_refused_at_initialize(ranks2: RankPool) -> None:
    first, second = ranks2.run(refused_sets)
    assert first == second
    for (kind, text), name in zip(first, ("Stream", "Unsized", "DataLoader"), strict=True):
        assert kind == "ConfigError" and name in text and "train_batch(data_iter=" in text


def as_float(outputs: Tensor, labels: Tensor) -> Any:
    return nn.functional.mse_loss(outputs, labels).item()


def without_gradient(outputs: Tensor, labels: Tensor) -> Any:
    return nn.functional.mse_loss(outputs.detach(), labels)


def train_once(rank: int, case: str) -> tuple[str, str]:
    if case == "float":
        engine = build(Samples("pair"), as_float)
    elif case == "detached":
        engine = build(Samples("pair"), without_gradient)
    else:
        engine = build(Samples("pair"), bf16={"enabled": True})  # of fp32 samples
    return error_of(engine.train_batch)


@pytest.mark.parametrize(
    ("case", "rank"), [("float", 1), ("detached", 1), pytest.param("bf16", 0, marks=needs("bf16"))]
)
def test_a_loss_without_a_gradient_and_inputs_of_another_precision(
    ranks: Ranks, case: str, rank: int
) -> None:
    pool = ranks(2)
    found = pool.run(train_once, case)
    pool.close()  # messages are left half-way
    kind, text = found[rank]
    assert kind == "ConfigError"
    if case in ("float", "detached"):
        assert text.startswith("loss_fn: ")
    else:
        assert text.startswith("inputs: ") and "torch.float32" in text
        assert "torch.bfloat16" in text


def test_a_module_needs_a_config() -> None:
    with pytest.raises(ConfigError, match=r"^config: "):
        ds_ext.PipelineModule([nn.Linear(WIDTH, WIDTH)])


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_set_that_fails_keeps_its_own_error(ranks: Ranks, evaluated: bool) -> None:
    pool = ranks(2)
    found = pool.run(broken_set, evaluated)
    pool.close()
    assert {kind for kind, _ in found} <= {"KeyError", "PeerGone"} and "KeyError" in {
        kind for kind, _ in found
    }


class Broken(Samples):
    def __getitem__(self, index: int) -> Any:
        raise KeyError(index)


def broken_set(rank: int, evaluated: bool) -> tuple[str, str]:
    engine = build(Broken("pair"))
    return error_of(lambda: engine.eval_batch(engine.batches) if evaluated else engine.train_batch())
