"""Every counted label of a step has the same weight, in whatever micro-batches, pipes and ranks it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import ds_ext
from ds_ext.engine.parameters import parameters_of
from ds_ext.errors import ConfigError, TransportError
from ds_ext.parallel.fbd import make_layout
from ds_ext.recipes.models.bert import BertConfig, BertLoss, bert_layer_specs
from ds_ext.recipes.models.gpt import GPTConfig, gpt_layer_specs, gpt_loss
from ds_ext.tensor_parallel import (
    IGNORE_INDEX,
    DropoutClock,
    TensorParallel,
    create_tensor_parallel,
    shard_dim,
)
from tests.bert_runs import BertChain, random_bert_batches
from tests.decoder_models import random_decoder
from tests.engine_runs import default_dtype
from tests.losses import share, step_counts
from tests.plans import placement_of
from tests.precisions import needs
from tests.ranks import Ranks
from tests.reference import Chain, gather_shards
from tests.selection import EVERYTHING, covering, select

SAMPLES, TOKENS = 8, 8
FP32 = 4e-6  # largest relative error in fp32; kernels of other processors sum in another order
LR = 1024.0  # a power of two, so large that the rounding of the weights does not hide gradients
SIZES: dict[str, Any] = {
    **{"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "seq_length": TOKENS, "vocab_size": 40},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "make_vocab_size_divisible_by": 8, "seed": 3},
}
GPT, BERT = GPTConfig(**SIZES), BertConfig(**SIZES)


def samples(kind: str) -> list[Any]:
    """Return (inputs, labels) of the samples of a step; sample i has i + 1 labels that count."""
    if kind == "bert":
        batches = random_bert_batches(BERT, 1, SAMPLES, micro_batch_size=1)[0]
        return [(tuple(t[0] for t in inputs), tuple(t[0] for t in labels)) for inputs, labels in batches]
    ids = torch.randint(3, 40, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    result = []
    for number, row_S in enumerate(ids):
        labels_S = row_S[1:].clone()
        counted = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(number))[: number + 1]
        labels_S[[i for i in range(TOKENS) if i not in counted]] = IGNORE_INDEX
        result.append((row_S[:-1], labels_S))
    return result


@dataclass(frozen=True)
class Job:
    """A step over the samples, and how it is laid over ranks."""

    kind: str
    schedule: str
    tp: int = 1
    dp: int = 1
    micro_batch_size: int = 1
    dtype: torch.dtype = torch.float32
    counts: bool = True
    exact: bool = True
    deepspeed: tuple[tuple[str, Any], ...] = ()
    ds_ext: tuple[tuple[str, Any], ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        return {
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            **dict(self.deepspeed),
            "ds_ext": {
                **{"schedule": self.schedule, "pipeline_parallel_size": 2, "tensor_parallel_size": self.tp},
                **{"print_plan": False, "transport_options": {"timeout_s": 30}, **dict(self.ds_ext)},
            },
        }

    @property
    def world_size(self) -> int:
        return make_layout(placement_of(self.config), self.tp, self.dp).world_size


class WithoutCounts:
    """Loss function without the method ``counts``."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = loss_fn

    def __call__(self, outputs: Any, labels: Any) -> Any:
        return self._loss_fn(outputs, labels)


def run(rank: int, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Take one step of each job. Returns loss, validation loss, counted tokens, gradient norm and gradients."""
    results = []
    for job in jobs:
        with default_dtype(job.dtype):
            results.append(run_one(job))
    return results


def run_one(job: Job) -> dict[str, Any]:
    layout = make_layout(placement_of(job.config), job.tp, job.dp)
    tp, clock = create_tensor_parallel(layout.groups()["tensor"]), DropoutClock()
    layers, loss_fn = layers_of(job.kind, tp, clock)
    if not job.counts:
        loss_fn = WithoutCounts(loss_fn)
    module = ds_ext.PipelineModule(
        layers, job.config, loss_fn=loss_fn, clock=clock, partition_method="uniform"
    )
    data = samples(job.kind)
    engine, *_ = ds_ext.initialize(model=module, config=job.config, training_data=data)
    evaluated = float(engine.eval_batch(data))
    before = named_weights(job.kind, module, tp, layers)
    loss = float(engine.train_batch())
    after = named_weights(job.kind, module, tp, layers)
    engine.transport.close()
    return {
        "loss": loss,
        "evaluated": evaluated,
        "tokens": engine.tokens,
        "norm": float(engine.get_global_grad_norm() or 0.0),
        "gradients": {name: (before[name] - after[name]) / LR for name in after},
    }


def layers_of(kind: str, tp: TensorParallel, clock: DropoutClock) -> tuple[list[Any], Any]:
    if kind == "llama":
        return ds_ext.from_transformers(random_decoder("Llama"))
    if kind == "bert":
        return bert_layer_specs(BERT, tp, clock), BertLoss(BERT, tp)
    return gpt_layer_specs(GPT, tp, clock), gpt_loss(GPT, tp)


def named_weights(kind: str, module: Any, tp: TensorParallel, layers: list[Any]) -> dict[str, Tensor]:
    """Return copies of this rank's full parameters, by their names in the reference."""
    found = {}
    for local in parameters_of(module, tp.size).values():
        name = f"{local.layer}.{local.key}"
        if kind == "llama":
            name = layers[1].module_args[1].name_of(local.layer, local.key)
        found[name] = gather_shards(local.parameter.detach(), shard_dim(local.parameter), tp).clone()
    return found


@cache
def reference(kind: str, dtype: torch.dtype) -> tuple[float, int, dict[str, Tensor]]:
    """Return loss, counted tokens and gradients of one process over all samples, one by one."""
    with default_dtype(dtype):
        tp, clock = TensorParallel(), DropoutClock()
        batches = [
            (tree_map(lambda t: t[None], inputs), tree_map(lambda t: t[None], labels))
            for inputs, labels in samples(kind)
        ]
        if kind == "llama":
            model: Any = random_decoder("Llama").train()
            tokens = sum(int((labels[:, 1:] != IGNORE_INDEX).sum()) for _, labels in batches)
            shares = [model(input_ids=x, labels=y, num_items_in_batch=tokens).loss for x, y in batches]
            named = model.named_parameters()
        else:
            model = BertChain(BERT, tp, clock) if kind == "bert" else Chain(GPT, tp, clock)
            _, loss_fn = layers_of(kind, tp, clock)
            counts = step_counts(loss_fn, [labels for _, labels in batches])
            tokens = next(iter(counts.values()))
            shares = [share(loss_fn(model(x), y), counts) for x, y in batches]
            named = model.parameters_by_layer().items()
        for part in shares:
            part.backward()
        return sum(part.item() for part in shares), tokens, {name: p.grad for name, p in named}


def largest_error(results: Iterable[Mapping[str, Any]], job: Job) -> float:
    """Return the largest error of a gradient, relative to the largest entry of its tensor."""
    loss, tokens, expected = reference(job.kind, job.dtype)
    seen, errors = set(), [0.0]
    for result in results:
        assert result["tokens"] == tokens
        assert (result["loss"], result["evaluated"]) == pytest.approx((loss, loss), rel=1e-6) or not job.exact
        for name, gradient in result["gradients"].items():
            size = float(expected[name].abs().max())
            # By rule: a gradient that is rounding only, such as that of the bias of the keys, is not compared.
            if size > 1e-6 * max(float(g.abs().max()) for g in expected.values()):
                errors.append(float((gradient[: len(expected[name])] - expected[name]).abs().max()) / size)
            seen.add(name)
    assert seen == expected.keys()
    return max(errors)


LAYOUTS = [
    *((schedule, tp, dp) for schedule in ("1f1b", "bitpipe", "zb_v") for tp, dp in ((1, 1), (1, 2), (2, 1))),
    *(("fbd", 1, 1), ("fbd", 2, 1)),
]


def jobs_of(kind: str, schedule: str, tp: int, dp: int) -> list[Job]:
    """Return the jobs of every micro-batch size with enough micro-batches, in fp32 and fp64."""
    sizes = [b for b in (1, 2, 4) if (SAMPLES // b // dp) % (2 if schedule == "bitpipe" else 1) == 0]
    # The decoders of transformers compute norms, rotations and the loss in fp32, also with fp64 weights.
    dtypes = (torch.float32,) if kind == "llama" else (torch.float32, torch.float64)
    jobs = [Job(kind, schedule, tp, dp, b, dtype=dtype) for b in sizes for dtype in dtypes]
    return (
        jobs if EVERYTHING else [job for job in jobs if job.dtype == dtypes[-1] or job.micro_batch_size == 1]
    )


CASES = [
    (k, *layout) for k in ("gpt", "bert", "llama") for layout in LAYOUTS if k != "llama" or layout[1] == 1
]


@pytest.mark.parametrize(("kind", "schedule", "tp", "dp"), covering(CASES, 1) if not EVERYTHING else CASES)
def test_gradients_are_those_of_one_process(ranks: Ranks, kind: str, schedule: str, tp: int, dp: int) -> None:
    jobs = jobs_of(kind, schedule, tp, dp)
    by_rank = ranks(jobs[0].world_size).run(run, jobs, timeout_s=120.0)
    for job, *results in zip(jobs, *by_rank, strict=True):
        error = largest_error(results, job)
        assert error < (1e-10 if job.dtype == torch.float64 else FP32), (job, error)


def test_with_equal_weights_of_micro_batches_the_gradients_differ(ranks: Ranks) -> None:
    job = Job("gpt", "1f1b", ds_ext=(("loss_weighting", "micro_batches"),), exact=False)
    with pytest.raises(AssertionError):
        largest_error([r for (r,) in ranks(2).run(run, [job])], job)  # it counts no tokens
    results = [r[0] | {"tokens": reference("gpt", job.dtype)[1]} for r in ranks(2).run(run, [job])]
    assert largest_error(results, job) > 0.01


ZERO = ("zero_optimization", {"stage": 1})
PROVISIONAL = [
    Job("gpt", "1f1b", counts=False),
    Job("gpt", "1f1b", dp=2, counts=False),
    Job("gpt", "bitpipe", counts=False, deepspeed=(ZERO,)),
    Job("gpt", "zb_v", dp=2, micro_batch_size=2, counts=False, deepspeed=(ZERO,)),
    Job("gpt", "bitpipe", counts=False, ds_ext=(("eager_gradient_sync", False),)),
    Job("gpt", "fbd", counts=False),
]


@pytest.mark.parametrize(
    "job", PROVISIONAL, ids=lambda job: f"{job.schedule}-dp{job.dp}-{len(job.deepspeed)}{len(job.ds_ext)}"
)
def test_a_loss_without_counts_gives_the_same_gradients(ranks: Ranks, job: Job) -> None:
    results = ranks(job.world_size).run(run, [job])
    assert largest_error([r for (r,) in results], job) < FP32


def clipped(rank: int, jobs: Sequence[Job]) -> list[tuple[float, dict[str, Tensor]]]:
    """Return the norm before clipping and the gradients of each job."""
    return [(result["norm"], result["gradients"]) for result in run(rank, jobs)]


@pytest.mark.parametrize("zero", [0, 1])
def test_the_norm_is_that_of_the_corrected_gradients(ranks: Ranks, zero: int) -> None:
    options = (("gradient_clipping", 0.01), ("zero_optimization", {"stage": zero}))
    jobs = [Job("gpt", "bitpipe", counts=counts, deepspeed=options) for counts in (True, False)]
    _, _, expected = reference("gpt", torch.float32)
    norm = float(torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt())
    for (first, gradients), (second, others) in ranks(2).run(clipped, jobs):
        assert (first, second) == pytest.approx((norm, norm), rel=1e-5)
        for name in gradients:
            clip = expected[name] * 0.01 / norm
            torch.testing.assert_close(gradients[name][: len(clip)], clip, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(others[name], gradients[name], rtol=1e-4, atol=1e-6)


def in_half(rank: int, dtype: str, counts: bool) -> tuple[float, float, dict[str, Tensor]]:
    """Return loss, gradient norm and weights after a step in half precision."""
    deepspeed = ((dtype, {"enabled": True}), ZERO)
    (result,) = run(rank, [Job("gpt", "bitpipe", counts=counts, deepspeed=deepspeed, exact=False)])
    return result["loss"], result["norm"], result["gradients"]


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=needs(dtype)) for dtype in ("bf16", "fp16")])
def test_half_precision(ranks: Ranks, dtype: str) -> None:

    loss, _, expected = reference("gpt", torch.float32)
    norm = float(torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt())
    for counts in (True, False) if dtype == "bf16" else (True,):
        for found, found_norm, _ in ranks(2).run(in_half, dtype, counts):
            assert (found, found_norm) == pytest.approx((loss, norm), rel=0.02)


# --- steps without labels, wrong counts, other forms of losses ---


class Linear(nn.Linear):
    """Linear layer of fp32 inputs."""


class Counted:
    """Squared error over the elements with a finite label, with counts or wrong ones."""

    def __init__(self, wrong: int = 0, terms: bool = False) -> None:
        self.wrong, self.terms = wrong, terms

    def __call__(self, outputs: Tensor, labels: Tensor) -> Any:
        counted = labels.isfinite()
        pair = (outputs - labels.nan_to_num()).square()[counted].sum(), counted.sum()
        return {"error": pair, "size": (outputs.square().sum(), outputs.numel())} if self.terms else pair

    def counts(self, labels: Tensor) -> Any:
        number = int(labels.isfinite().sum()) + self.wrong
        return {"error": number, "size": labels.numel()} if self.terms else number


def own_engine(
    loss_fn: Any, data: Any, zero: int = 0, schedule: str = "1f1b", optimizer: str = "AdamW"
) -> Any:
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": optimizer, "params": {"lr": 0.1, "weight_decay": 0.1}},
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2, "print_plan": False},
    }
    if optimizer == "AdamW":
        config["optimizer"]["params"]["torch_adam"] = True
    layers = [LayerSpec(Linear, 4, 4) for _ in range(4)]
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=module, config=config, training_data=data)
    return engine


def pairs(counted: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return samples, each with this number of finite labels of 4."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for number in counted:
        labels = torch.randn(4, generator=generator)
        labels[number:] = torch.nan
        result.append((torch.randn(4, generator=generator), labels))
    return result


def steps_without_labels(rank: int, zero: int) -> list[Any]:
    """Train a step without labels, one with them, and one without, and evaluate. Returns what each changed."""
    engine = own_engine(Counted(), pairs([0] * 4 + [1, 2, 3, 4] + [0] * 4), zero)
    found: list[Any] = []
    for _ in range(3):
        before = [p.detach().clone() for p in engine.module.parameters()]
        loss = float(engine.train_batch())
        same = all(map(torch.equal, before, engine.module.parameters()))
        found.append((loss, engine.tokens, same, float(engine.get_global_grad_norm())))
        assert float(engine.eval_batch(pairs([0] * 4))) == 0.0
    states = [tuple(sorted(map(str, one))) for one in optimizer_states(engine)]
    engine.transport.close()
    return [*found, states]


def optimizer_states(engine: Any) -> list[Any]:
    return list(getattr(engine.optimizer, "optimizer", engine.optimizer).state.values())


@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_without_counted_labels_changes_no_weight(ranks: Ranks, zero: int) -> None:
    for first, second, third, states in ranks(2).run(steps_without_labels, zero):
        assert (first, third) == ((0.0, 0, True, 0.0), (0.0, 0, True, 0.0))
        assert second[0] > 0 and second[1:3] == (10, False)
        assert states and all("exp_avg" in one for one in states)


def with_terms(rank: int, schedule: str) -> tuple[float, dict[str, float], int]:
    engine = own_engine(Counted(terms=True), pairs([1, 2, 3, 4]), schedule=schedule)
    loss = float(engine.train_batch())
    parts = {name: float(value) for name, value in engine.agg_additional_losses.items()}
    engine.transport.close()
    return loss, parts, engine.tokens


@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe"])
def test_every_term_has_its_own_count(ranks: Ranks, schedule: str) -> None:
    layers = []
    for index in range(4):
        torch.manual_seed(1234 + index)
        layers.append(Linear(4, 4))
    data = pairs([1, 2, 3, 4])
    losses = [Counted(terms=True)(nn.Sequential(*layers)(x[None]), y[None]) for x, y in data]
    parts = {
        name: sum(loss[name][0].item() for loss in losses) / count
        for name, count in (("error", 10), ("size", 16))
    }
    for loss, found, tokens in ranks(2).run(with_terms, schedule):
        assert found == pytest.approx(parts, rel=1e-5) and tokens == 10
        assert loss == pytest.approx(sum(parts.values()), rel=1e-5)


class Changing:
    """Pair in training, mean in evaluations."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Any:
        total, count = Counted()(outputs, labels)
        return (total, count) if torch.is_grad_enabled() else total / count


class Weighted:
    """Labels that weigh a tenth each, which needs a method ``counts``."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Any:
        total, count = Counted()(outputs, labels)
        return total * 0.1, count * 0.1

    def counts(self, labels: Tensor) -> float:
        return 0.1 * int(labels.isfinite().sum())


class NamedCounts(nn.Module):
    """Mean with a buffer that is called counts."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(3))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        total, count = Counted()(outputs, labels)
        return total / count


def after_an_evaluation(rank: int) -> list[tuple[float, list[Tensor]]]:
    """Return (loss, change of the weights) of a step with SGD after an evaluation, for some loss functions."""
    found = []
    for loss_fn in (Counted(), Changing(), WithoutCounts(Counted()), Weighted(), NamedCounts()):
        engine = own_engine(loss_fn, pairs([1, 1, 1, 1]), optimizer="SGD")
        before = [p.detach().clone() for p in engine.module.parameters()]
        engine.eval_batch(pairs([1, 1, 1, 1]))
        loss = float(engine.train_batch())
        found.append(
            (loss, [(p.detach() - b) for p, b in zip(engine.module.parameters(), before, strict=True)])
        )
        engine.transport.close()
    return found


def test_other_forms_of_the_same_loss_give_the_same_step(ranks: Ranks) -> None:
    for (loss, changes), *others in ranks(2).run(after_an_evaluation):
        for other, other_changes in others:
            assert other == pytest.approx(loss, rel=1e-5)
            for one, expected in zip(other_changes, changes, strict=True):
                torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)


class Alternating:
    """Another term in every micro-batch, without a method ``counts``."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Any:
        self.calls += 1
        return {"ab"[self.calls % 2]: Counted()(outputs, labels)}


def refused(rank: int) -> list[tuple[str, bool]]:
    """Return the keys of the errors for wrong losses, and whether the weights are unchanged."""
    found = []
    losses: list[Any] = [Counted(wrong=1), WithoutCounts(Counted(terms=True))]
    losses += [lambda o, y: (o.sum(), "4"), lambda o, y: (o.sum(), o.mean()), lambda o, y: (o.sum(), -1.0)]
    losses += [Alternating()]
    for loss_fn in losses:
        engine = own_engine(loss_fn, pairs([1, 2, 3, 4]))
        before = [p.detach().clone() for p in engine.module.parameters()]
        with pytest.raises((ConfigError, TransportError)) as caught:
            engine.train_batch()
        key = str(caught.value).partition(":")[0] if isinstance(caught.value, ConfigError) else ""
        found.append((key, all(map(torch.equal, before, engine.module.parameters()))))
        engine.transport.close()
    return found


def test_wrong_counts_are_refused_before_the_weights_change(ranks: Ranks) -> None:
    results = ranks(2).run(refused)
    assert all(unchanged for result in results for _, unchanged in result)
    keys = [{key for key, _ in of_ranks} - {""} for of_ranks in zip(*results, strict=True)]
    assert keys == [{"loss_fn.counts"}, *[{"loss_fn"}] * 5]


# --- second values that are no counts ---

CLASSES, TOKENS = 3, 5


class Scores(nn.Module):
    """Logits (B, S, classes), and the mask (B, S) that the data brings with the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(inputs[0]), inputs[1]


class WithMask(nn.Module):
    """Linear layer beside a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(inputs[0]), inputs[1]


def classified(seed: int = 0) -> list[Any]:
    """Samples ((x, mask), (labels, mask of floats)); the first two have no label that counts."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(8):
        labels = torch.randint(0, CLASSES, (TOKENS,), generator=generator)
        mask = torch.rand(TOKENS, generator=generator) < 0.6
        labels[~mask] = -100
        if number < 2:
            labels[:], mask = -100, torch.zeros(TOKENS, dtype=torch.bool)
        samples.append(((torch.randn(TOKENS, 4, generator=generator), mask.int()), (labels, mask.float())))
    return samples


class Returns:
    """Cross entropy as (its sum, second value of that kind)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, outputs: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> Any:
        (logits, mask_of_inputs), (labels_BS, mask) = outputs, labels
        counted = labels_BS != -100
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels_BS.flatten(), reduction="none")
        mean, right = losses.sum() / counted.sum().clamp(min=1), (logits.argmax(-1) == labels_BS).float()
        if self.kind in ("accuracy", "perplexity", "detached", "one", "none", "metrics", "text"):
            return mean, {
                "accuracy": right.sum() / counted.sum().clamp(min=1),
                "perplexity": mean.detach().exp(),
                "detached": mean.detach(),
                "one": 1,
                "none": None,
                "metrics": {"accuracy": right.mean()},
            }.get(self.kind)
        return losses.sum(), {
            "right": right.sum(),
            "all right": counted.sum() + (labels_BS == 2).sum(),
            "half": counted.to(torch.bfloat16).sum(),
            "tenths": mask.sum() / 10,
            "labels": counted.sum(),
            "number": int(counted.sum()),
            "not negative": (labels_BS >= 0).sum().float(),
            "mask": mask.sum(),
            "mask of inputs": mask_of_inputs.sum(),
            "shifted mask": mask[:, 1:].sum(),
            "shifted": (labels_BS[:, 1:] != -100).sum(),
            "tokens": labels_BS.numel(),
            "samples": len(labels_BS),
        }[self.kind]


NO_COUNTS = [
    "accuracy",
    "perplexity",
    "detached",
    "one",
    "none",
    "metrics",
    "right",
    "all right",
    "half",
    "tenths",
]
NO_NUMBERS = ("none", "metrics", "half")
COUNTS = {
    **dict.fromkeys(("labels", "number", "not negative", "mask", "mask of inputs"), "labels"),
    **dict.fromkeys(("shifted mask", "shifted"), "shifted"),
    **{"tokens": "tokens", "samples": "samples"},
}


def engine_of(kind: str, schedule: str, weighting: str = "tokens") -> Any:
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
        "ds_ext": {
            "schedule": schedule,
            "pipeline_parallel_size": 2,
            "loss_weighting": weighting,
            "print_plan": False,
        },
    }
    layers = [*(LayerSpec(WithMask) for _ in range(3)), LayerSpec(Scores)]
    module = ds_ext.PipelineModule(layers, config, loss_fn=Returns(kind), partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=module, config=config, training_data=classified())
    return engine


def errors_of_no_counts(rank: int, schedule: str, weighting: str) -> list[tuple[str, str, bool]]:
    """Return type and text of the errors of a step and of an evaluation, and whether the weights are unchanged."""
    found = []
    for kind in NO_COUNTS:
        # A value that is no number fails where the loss is computed, and ends an evaluation with that process.
        for name in ("train_batch", "train_batch" if kind in NO_NUMBERS else "eval_batch"):
            engine = engine_of(kind, schedule, weighting)
            before = [p.detach().clone() for p in engine.module.parameters()]
            with pytest.raises((ConfigError, TransportError)) as caught:
                engine.train_batch() if name == "train_batch" else engine.eval_batch(classified(1))
            same = all(map(torch.equal, before, engine.module.parameters()))
            found.append((type(caught.value).__name__, str(caught.value), same))
            engine.transport.close()
    return found


@pytest.mark.parametrize(
    ("schedule", "weighting"),
    select([("1f1b", "tokens"), ("bitpipe", "tokens"), ("1f1b", "micro_batches")], [("bitpipe", "tokens")]),
)
def test_metrics_are_no_counts(ranks: Ranks, schedule: str, weighting: str) -> None:
    results = ranks(2).run(errors_of_no_counts, schedule, weighting, timeout_s=180)
    for number, of_ranks in enumerate(zip(*results, strict=True)):
        kind = NO_COUNTS[number // 2]
        texts = {text for error, text, _ in of_ranks if error == "ConfigError"}
        assert len(texts) == 1 and all(same for _, _, same in of_ranks)
        (text,) = texts
        assert text.startswith("loss_fn: ")
        if kind not in NO_NUMBERS:
            assert {error for error, _, _ in of_ranks} == {"ConfigError"}
            assert "additional_losses" in text and "counts(labels)" in text
        if kind == "one":
            assert "got 4 " in text


def with_counts(rank: int, schedule: str) -> list[tuple[float, int, float]]:
    """Return loss and tokens of a step, and the loss of an evaluation, for each way to count."""
    found = []
    for kind in COUNTS:
        engine = engine_of(kind, schedule)
        evaluated = float(engine.eval_batch(classified(1)))
        found.append((float(engine.train_batch()), engine.tokens, evaluated))
        engine.transport.close()
    return found


@pytest.mark.parametrize("schedule", select(["1f1b", "bitpipe"], ["bitpipe"]))
def test_every_way_to_count_labels_is_a_count(ranks: Ranks, schedule: str) -> None:
    layers: list[nn.Module] = []
    for index, kind in enumerate([WithMask] * 3 + [Scores]):
        torch.manual_seed(1234 + index)
        layers.append(kind())
    model, expected = nn.Sequential(*layers), dict[str, list[tuple[float, int]]]()
    for seed in (0, 1):
        (x, mask), labels = torch.utils.data.default_collate(classified(seed))
        total = Returns("labels")(model((x, mask)), labels)[0].item()
        counted = labels[0] != -100
        counts = {
            "labels": counted.sum(),
            "shifted": counted[:, 1:].sum(),
            "tokens": counted.numel(),
            "samples": 8,
        }
        for name, count in counts.items():
            expected.setdefault(name, []).append((total / int(count), int(count)))
    for found in ranks(2).run(with_counts, schedule, timeout_s=180):
        for kind, (loss, tokens, evaluated) in zip(COUNTS, found, strict=True):
            (trained, count), (other, _) = expected[COUNTS[kind]]
            assert loss == pytest.approx(trained, rel=1e-5) and tokens == count
            assert evaluated == pytest.approx(other, rel=1e-5)
