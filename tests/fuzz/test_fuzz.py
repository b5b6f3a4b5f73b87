"""Some jobs of the fuzzer, and checks of the fuzzer itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import Ranks
from tests.selection import select

from . import habits, reference
from .actions import (
    ACTIONS,
    AddGroup,
    Average,
    EditGroup,
    EditWeights,
    EvalMode,
    Evaluate,
    Hook,
    Mode,
    Resize,
    Toggle,
)
from .compare import differences
from .data import ordered_batch
from .habits import HABITS
from .job import SCHEDULES, Job, Layout, draw
from .run import (
    INVALID,
    REFUSED,
    SAME,
    _candidates,  # pyright: ignore[reportPrivateUsage]
    diverges,
    run,
)
from .scripts import AT_START, Action
from .zoo import ENDS, STARTS, ZOO

TWO = Layout(pp=2)
SCRIPTED = Job(
    layout=TWO, blocks=("linear", "mlp", "dropout", "linear"), optimizer="momentum", micro_batches=2
)
# Each action as scripts do it, and options of the job.
SCRIPTS: dict[str, tuple[Action, dict[str, Any]]] = {
    "freeze": (Toggle(1, (0, 1)), {}),
    "freeze at start": (Toggle(AT_START, (1,)), {"zero": 1}),
    "unfreeze a frozen layer": (Toggle(1, (2,), True), {"blocks": ("linear", "mlp", "frozen", "linear")}),
    "add a group": (AddGroup(1, (0,)), {}),
    "eval mode": (Mode(0, (2,)), {}),
    "eval mode before every step": (Mode(1, (2,), True), {}),
    "eval mode of everything": (EvalMode(1), {}),
    "rate by position": (EditGroup(1, 1, "lr", 0.25), {"groups": "layers"}),
    "decay by name": (EditGroup(1, "biases", "weight_decay", 2.0), {"groups": "names"}),
    "scaled weights": (EditWeights(1, "scale"), {}),
    "clamped weights": (EditWeights(1, "clamp"), {"bf16": True}),
    "noise": (EditWeights(2, "noise"), {}),
    "assigned weights": (EditWeights(1, "data"), {"zero": 1}),
    "average": (Average(0, 2, "copy"), {}),
    "assigned average": (Average(0, 2, "data"), {"bf16": True}),
    "loaded average": (Average(1, 3, "load"), {}),
    "torch's average": (Average(0, 2, "averaged_model"), {}),
    "copied module": (Average(0, 2, "deepcopy"), {}),
    "evaluation of other sizes": (Evaluate(1, 3, 1, logits=True), {}),
    "evaluation of a dataset": (Evaluate(2, samples=7), {"layout": Layout(dp=2)}),
    "more micro-batches": (Resize(1, 5), {"data": "dataset"}),
    **{f"hook {kind}": (Hook(1, (1, 2), kind), {}) for kind in Hook.KINDS},
}
# What else a script does: options of a job.
HABITUAL: dict[str, dict[str, Any]] = {
    "bf16 weights": {"weights": "bf16", "layout": Layout(dp=2)},
    "bf16 weights and ZeRO": {"weights": "bf16", "zero": 1, "layout": Layout(dp=2)},
    "a parameter without elements": {
        "weights": "bf16",
        "zero": 1,
        "blocks": ("scalar_parameter", "linear"),
        "layout": Layout(dp=2),
    },
    "a bf16 layer": {"blocks": ("linear", "bf16_layer", "linear")},
    "a layer with its own train()": {"blocks": ("linear", "frozen_batch_norm", "linear")},
    "a tied layer with other values": {"blocks": ("linear", "tied_frozen", "linear")},
    "an fp32 parameter": {"blocks": ("fp32_scale", "linear"), "weights": "bf16"},
    "an fp16 layer, reduced late": {
        "blocks": ("linear", "fp16_layer"),
        "layout": Layout(dp=2),
        "eager_gradient_sync": False,
    },
    "fp64 samples": {"start": "fp64_samples", "bf16": True},
    "two classes of a tie": {"blocks": ("tied_classes",), "layout": Layout("zb_v", pp=2)},
    "experts": {"blocks": ("experts_1", "linear")},
    "loss and accuracy": {"end": "loss_and_accuracy", "start": "tokens"},
    "terms": {"end": "terms", "start": "tokens"},
    "additional losses": {"end": "additional", "start": "tokens"},
    "additional losses of slices": {
        "end": "additional_of_pair",
        "blocks": (),
        "layout": Layout(slices=(4, 8)),
        "length": 12,
    },
    "empty groups": {"groups": "ends", "scheduler": "lambdas", "blocks": ("linear",) * 4},
    "accumulation": {"by_accumulation": True},
    "weights only": {"resume": Layout("zb_v", pp=2), "resume_with": "module_only"},
    "weights only, seeds": {
        "resume": Layout(pp=2),
        "resume_with": "module_only",
        "data": "random_dataset",
        "rank_seeds": True,
        "evaluate_after": 3,
    },
    "own file": {"resume": Layout(pp=2), "resume_with": "own_file"},
    "compiled at first": {"resume": Layout(pp=2), "compiled": "first"},
    "compiled by the engine": {"compiled": "engine"},
    "closure": {"optimizer": "lbfgs", "own_optimizer": True},
}

SEEDS = (
    2,
    3,
    4,
    5,
    7,
    9,
    10,
    11,
    12,
    13,
    14,
    15,
    16,
    17,
    19,
    20,
    21,
    22,
    25,
    28,
    29,
    30,
    61,
)  # at most four ranks


@pytest.mark.parametrize("seed", select([*SEEDS], [*SEEDS[::2]]))
def test_a_job_has_the_numbers_of_one_process(ranks: Ranks, seed: int) -> None:
    job = draw(seed)
    outcome = run(job, ranks)
    assert outcome.kind in (SAME, REFUSED), (job, outcome.lines)


@pytest.mark.parametrize("name", select([*SCRIPTS], [*SCRIPTS][::2]))
def test_a_script_has_the_numbers_of_one_process(ranks: Ranks, name: str) -> None:
    action, options = SCRIPTS[name]
    outcome = run(dataclasses.replace(SCRIPTED, script=(action,), **options), ranks)
    assert outcome.kind in (SAME, REFUSED), outcome


@pytest.mark.parametrize("name", select([*HABITUAL], [*HABITUAL][::2]))
def test_a_habit_has_the_numbers_of_one_process(ranks: Ranks, name: str) -> None:
    outcome = run(dataclasses.replace(SCRIPTED, **HABITUAL[name]), ranks)
    assert outcome.kind in (SAME, REFUSED), outcome


@pytest.mark.quick
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_action_changes_the_numbers_of_one_process(name: str) -> None:
    action, options = SCRIPTS[name]
    job = dataclasses.replace(SCRIPTED, **options)
    scripted = dataclasses.replace(job, script=(action,))
    assert scripted.is_reproducible
    without, result = reference.train(job), reference.train(scripted)
    if isinstance(action, Average | Evaluate | EvalMode):  # they train as before
        assert result.losses == without.losses and len(result.evaluations) == 1
    elif action != Hook(1, (1, 2), "accumulated"):
        assert result.losses != without.losses
    assert not isinstance(action, Hook) or result.calls[action] > 0


@pytest.mark.quick
def test_every_habit_is_drawn_and_can_be_aimed_at() -> None:
    names = {"Job": Job, "Layout": Layout, **ACTIONS}
    for habit in HABITS:
        aimed = [job for seed in range(20) if (job := habits.draw(seed, [habit])) is not None]
        assert aimed, habit
        assert all(job.is_reproducible and eval(repr(job), names) == job for job in aimed), habit
    drawn = {name for seed in range(400) if (job := habits.draw(seed)) for name in job.features}
    assert {*ACTIONS, "weights", "groups", "by_accumulation", "resume_with", "compiled"} <= drawn


@pytest.mark.quick
def test_a_script_is_reduced() -> None:
    kept = Hook(1, (0, 1), "parameter")
    job = dataclasses.replace(SCRIPTED, script=(EditWeights(1), kept), groups="names")
    scripts = {candidate.script for candidate in _candidates(job)}
    assert {(), (kept,), (EditWeights(1),), (EditWeights(1), Hook(1, (0,), "parameter"))} <= scripts
    assert any(not candidate.groups for candidate in _candidates(job))


def test_a_job_that_diverges_is_invalid(ranks: Ranks) -> None:
    assert not diverges(reference.train(SCRIPTED))
    job = Job(blocks=("linear", *["scale_in_place"] * 40), steps=8)
    assert diverges(reference.train(job))
    assert run(job, ranks).kind == INVALID


def test_torch_does_not_train_a_reentrant_checkpoint_behind_frozen_layers(ranks: Ranks) -> None:
    job = Job(start="tokens", blocks=("linear", "checkpointed_reentrant", "linear"), layout=Layout(pp=2))
    assert run(job, ranks).kind == SAME
    assert run(dataclasses.replace(job, script=(Toggle(AT_START, (0, 1), False),)), ranks).kind == INVALID


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["", "bf16", "double"])
def test_every_kind_trains_in_one_process(precision: str) -> None:
    options: dict[str, Any] = {precision: True} if precision else {}
    for name, kind in ZOO.items():
        job = Job(blocks=(name, "linear"), steps=2, evaluate_after=1, **options)
        if not (job.bf16 and kind.fp32):
            result = reference.train(job)
            assert len(set(result.losses)) == 2, name
            assert result.state.keys() == reference.Model(job).state().keys()


@pytest.mark.quick
def test_every_end_trains_from_every_start() -> None:
    for end, of_end in ENDS.items():
        for start in STARTS:
            if of_end.start in (None, start):
                result = reference.train(Job(start=start, end=end, blocks=("linear", "mlp"), steps=2))
                assert result.norms[0], (start, end)


@pytest.mark.quick
def test_jobs_are_drawn_from_everything() -> None:
    jobs = [job for job in map(habits.draw, range(800)) if job is not None]
    assert jobs[:100] == [*map(habits.draw, range(100))]
    assert len(ZOO) >= 60
    assert {job.layout.schedule for job in jobs} == set(SCHEDULES)
    deterministic = {name for name, kind in ZOO.items() if not kind.random}
    assert {name for job in jobs for name in job.blocks} >= deterministic
    data = {"dataset", "random_dataset", "batches", "iterator", "loader", "unequal"}
    assert {job.data for job in jobs} == data
    for job in jobs:
        assert eval(repr(job), {"Job": Job, "Layout": Layout, **ACTIONS}) == job


@pytest.mark.quick
@pytest.mark.parametrize(("bf16", "last"), [(False, "linear"), (True, "linear"), (False, "autocast")])
def test_a_tenth_of_a_norm_or_a_learning_rate_is_a_difference(bf16: bool, last: str) -> None:
    job = Job(blocks=("mlp", "layer_norm", last), bf16=bf16, optimizer="momentum")
    expected, noisy = reference.train(job), [reference.train(job, noise_seed=1)]
    assert not differences(job, [reference.train(job, noise_seed=2)], expected, noisy)
    wrong = dataclasses.replace(expected, norms=[0.9 * norm for norm in expected.norms if norm is not None])
    assert differences(job, [wrong], expected, noisy)
    larger = {name: value * (1.1 if job.rounds else 1.0001) for name, value in expected.state.items()}
    assert differences(job, [dataclasses.replace(expected, state=larger)], expected, noisy)
    assert differences(job, [dataclasses.replace(expected, state={})], expected, noisy)
    assert not torch.equal(next(iter(larger.values())), next(iter(expected.state.values())))


@pytest.mark.quick
def test_the_largest_effect_of_rounding_counts() -> None:
    """Each of two weights moves in another set of rounding errors, as by a step of Adam of another sign."""
    job = Job(bf16=True)
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    expected = dataclasses.replace(reference.train(job), state={"0.weight": torch.zeros(2)})
    noisy = [dataclasses.replace(expected, state={"0.weight": value}) for value in (0.01 * first, second)]
    both = [dataclasses.replace(expected, state={"0.weight": first + second})]
    assert differences(job, both, expected, noisy[:1])
    assert not differences(job, both, expected, noisy)


def test_weights_that_a_script_assigns_are_followed_into_the_memory_of_zero(ranks: Ranks) -> None:
    job = Job(
        layout=Layout(pp=2),
        start="tied_tokens",
        blocks=("detached_input",),
        end="chunked_tied_pair",
        micro_batch_size=1,
        micro_batches=1,
        steps=1,
        zero=1,
        set_weights="assign",
    )
    assert run(job, ranks).kind == SAME


def test_adam_enlarges_the_rounding_errors_of_bf16_layers(ranks: Ranks) -> None:
    # Tied pairs are scaled before the backward in a pipeline only, which changes how bf16 messages round gradients.
    job = Job(
        layout=Layout("dualpipev", pp=2),
        start="tied_tokens",
        blocks=("bf16_message", "linear", "encoder_layer", "bf16_message"),
        end="tied_pair",
        optimizer="adam",
        micro_batch_size=1,
        micro_batches=8,
        steps=1,
    )
    outcome = run(job, ranks)
    assert outcome.kind == SAME, outcome.lines


@pytest.mark.quick
def test_kinds_that_keep_the_gradient_of_their_input_are_marked() -> None:
    for name, kind in ZOO.items():
        job = Job(blocks=("in_place_backward", name, "linear"), micro_batch_size=1, optimizer="momentum")
        alone, added = (_gradients(job, zero_between) for zero_between in (True, False))
        same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone, added, strict=True))
        assert same != kind.keeps_gradient, name


def _gradients(job: Job, zero_between: bool) -> list[Tensor]:
    """Return the sum of the gradients of two micro-batches, which autograd or this function adds."""
    model = reference.Model(job)
    sums: dict[int, Tensor] = {}
    for number in range(2):
        torch.manual_seed(number)
        model.loss_of(ordered_batch(job, 0, number)).backward()
        for index, p in enumerate(model.parameters):
            if p.grad is not None and (zero_between or number == 1):
                sums[index] = sums.get(index, 0) + p.grad
                p.grad = None
    return [sums[index] for index in sorted(sums)]
