"""Faults of mixtures of experts (docs/deepspeed_issues.md) that no other file tests.

The tensor-parallel ranks divide the experts. Every job has four ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ds_ext
from ds_ext.engine.parameters import parameters_of
from tests.decoder_models import (
    EXPERTS_MODELS,
    MODELS,
    MORE_MODELS,
    ROUTERS_LOSS,
    config_of,
    micro_batch,
    random_decoder,
)
from tests.distributed.test_hf_tensor_parallel import joined
from tests.distributed.test_own_layers import Batches
from tests.ranks import RankPool
from tests.reference import assert_close_gradients

pytest.importorskip("transformers")
FAMILIES = {**MODELS, **MORE_MODELS, **EXPERTS_MODELS}
MICRO_BATCHES, SIZE = 4, 2
MicroBatch = tuple[tuple[Tensor, Tensor], Tensor]
Data = Callable[[int, int], MicroBatch]


class Job(NamedTuple):
    """Job of four ranks. Its default rate makes the change of a weight as exact as the gradient."""

    schedule: str
    pp: int
    tp: int
    zero: int = 0
    steps: int = 1
    clip: float = 0.0
    lr: float = 64.0
    decay: float = 0.0  # of AdamW; 0: SGD

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if not self.decay:
            return torch.optim.SGD(parameters, lr=self.lr)
        return torch.optim.AdamW(parameters, lr=self.lr, eps=1e-5, weight_decay=self.decay)


class Result(NamedTuple):
    """Results of a rank or of one process. A shard is (tensor-parallel rank, shard, its dimension, whole size).

    Attributes:
        norms: gradient norms of the steps before clipping.
        gradients: those of the last step; empty with ZeRO.
        weights: those after the last step.
        numbers: micro-batches that the rank read.
    """

    norms: list[float]
    gradients: dict[str, Any]
    weights: dict[str, Any]
    numbers: frozenset[int] = frozenset()


def saved(model: Any, folder: Path, **changes: Any) -> str:
    """Write a model, with changes to its ``config.json``. Returns the path."""
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return str(folder)


def train(rank: int, folder: str, job: Job, data: Data) -> Result:
    layers, loss_fn = ds_ext.from_transformers(folder)
    config = config_of(job.schedule, job.pp, MICRO_BATCHES) | {
        "train_batch_size": SIZE * MICRO_BATCHES,
        "gradient_clipping": job.clip,
        "zero_optimization": {"stage": job.zero},
        "zero_allow_untested_optimizer": True,
    }
    config["ds_ext"]["tensor_parallel_size"] = job.tp
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    optimizer = job.optimizer(module.parameters())
    engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    *_, tensor_rank = module.layout.coordinates(rank)

    def tensors(read: Callable[[Any], Tensor | None]) -> dict[str, Any]:
        by_name = {}
        for local in parameters_of(module, job.tp).values():
            if (value := read(local.parameter)) is not None:
                key = layers[1].module_args[1].name_of(local.layer, local.key)
                by_name[key] = tensor_rank, value.detach().clone(), local.shape.dim, local.shape.full
        return by_name

    gradients, norms, numbers = dict[str, Any](), list[float](), set[int]()
    optimizer.register_step_pre_hook(lambda *_: gradients.update(tensors(lambda p: p.grad)))

    def read(step: int, number: int) -> MicroBatch:
        numbers.add(number)
        return data(step, number)

    batches: Any = Batches(read)  # pyright: ignore[reportArgumentType]
    for _ in range(job.steps):
        engine.train_batch(batches)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    engine.transport.close()
    return Result(norms, gradients, tensors(lambda p: p), frozenset(numbers))


def add_gradients(model: Any, data: Data, step: int) -> None:
    """Add the gradients of a step: the mean over all labels, and the mean of the routers' losses."""
    batches = [data(step, number) for number in range(MICRO_BATCHES)]
    count = sum(int((labels_BS[:, 1:] != -100).sum()) for _, labels_BS in batches)
    for (ids_BS, mask_BS), labels_BS in batches:
        outputs = model(input_ids=ids_BS, attention_mask=mask_BS)
        losses = nn.functional.cross_entropy(outputs.logits[:, :-1].mT, labels_BS[:, 1:], reduction="sum")
        loss = losses / count
        if getattr(outputs, "aux_loss", None) is not None:
            loss = loss + model.router_aux_loss_coef * outputs.aux_loss / MICRO_BATCHES
        loss.backward()


def in_one_process(model: Any, job: Job, data: Data) -> Result:
    """Train transformers' own model."""
    optimizer, norms = job.optimizer(model.train().parameters()), []
    for step in range(job.steps):
        optimizer.zero_grad()
        add_gradients(model, data, step)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), job.clip or math.inf)))
        optimizer.step()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    return Result(norms, gradients, weights_of(model))


def weights_of(model: Any) -> dict[str, Tensor]:
    return {key: parameter.detach().clone() for key, parameter in model.named_parameters()}


def assert_as_one_process(
    results: list[Result], before: dict[str, Tensor], expected: Result, modules: str = ""
) -> None:
    """Compare norms, gradients of some modules, and the weights, or their changes in one step."""
    for result in results:
        assert result.norms == pytest.approx(expected.norms, rel=1e-5)
    start = before if len(expected.norms) == 1 else {}
    for field in ("gradients", "weights"):
        found, whole = joined([getattr(result, field) for result in results]), getattr(expected, field)
        assert found.keys() == whole.keys() or not found
        for key, tensor in found.items():
            if modules in key:
                zero = start.get(key, 0.0) if field == "weights" else 0.0
                assert_close_gradients(tensor - zero, whole[key] - zero, f"{field} {key}")


def decoder(name: str, **changes: Any) -> Any:
    return random_decoder(name, **{**FAMILIES[name], **changes}, experts_implementation="eager")


# --- gradient of the routers' loss (Automodel#1408, #1412, #3359) ---


@pytest.mark.parametrize("zero", [0, 1])
def test_routers_have_the_whole_gradient_of_their_loss(ranks4: RankPool, tmp_path: Path, zero: int) -> None:
    """Two replicas of two stages. Half of the micro-batches have fewer labels."""
    job = Job("1f1b", pp=2, tp=1, zero=zero)
    before, folder = weights_of(decoder("Mixtral")), saved(decoder("Mixtral"), tmp_path, **ROUTERS_LOSS)
    results = ranks4.run(train, folder, job, micro_batch)
    expected = in_one_process(decoder("Mixtral", **ROUTERS_LOSS), job, micro_batch)
    without = in_one_process(decoder("Mixtral"), job, micro_batch)
    assert {result.numbers for result in results} == {frozenset((0, 1)), frozenset((2, 3))}
    assert_as_one_process(results, before, expected)
    for key in (key for key in before if "gate.weight" in key):
        gradient = expected.gradients[key]
        assert float((gradient - without.gradients[key]).norm()) > 0.2 * float(gradient.norm())


# --- experts without tokens (Automodel#935, #2995; transformers#48205, #48687) ---

EVEN, ODD, IDLE = (0, 1), (1, 4), (2, 3, 5)  # experts of even tokens, of odd tokens, of none


def steered(name: str) -> Any:
    """Return a decoder of six experts whose tokens decide their experts.

    Of two tensor-parallel ranks, even tokens use the experts of the first one only.
    """
    sizes = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_local_experts": 6, "num_experts": 6}
    model = decoder(name, **sizes)
    with torch.no_grad():
        words = model.get_input_embeddings().weight
        words[:, 0], words[:, 1] = 1.0 - 2.0 * (torch.arange(len(words)) % 2), 1.0
        for layer in model.model.layers:
            columns = torch.tensor([[1.0, 0], [0, 1], [0, -3], [0, -3], [-1, 0], [0, -3]])
            layer.mlp.gate.weight[:, :2] = columns
    return model


def steered_tokens(step: int, number: int) -> MicroBatch:
    """Return a micro-batch of even or of odd tokens. All are even in every second step, otherwise those of a half."""
    (ids_BS, mask_BS), labels_BS = micro_batch(step, number)
    is_odd = step % 2 == 0 and (number < MICRO_BATCHES // 2) == (step % 4 == 0)
    ids_BS = ids_BS - (ids_BS + is_odd) % 2
    return (ids_BS, mask_BS), ids_BS.masked_fill(labels_BS == -100, -100)


def experts_of(model: Any, step: int, number: int) -> set[tuple[int, ...]]:
    """Return the experts that a micro-batch uses in each layer."""
    found: set[tuple[int, ...]] = set()

    def read(experts: nn.Module, args: Any) -> None:
        found.add(tuple(args[1].unique().tolist()))

    handles = [layer.mlp.experts.register_forward_pre_hook(read) for layer in model.model.layers]
    model(*steered_tokens(step, number)[0])
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize(("zero", "tp"), [(0, 1), (1, 1), (0, 2), (1, 2)])
def test_idle_experts_decay_alike(ranks4: RankPool, tmp_path: Path, zero: int, tp: int) -> None:
    """One of two replicas has no token for expert 4. In every second step, none has one."""
    job = Job("1f1b", pp=2 // tp, tp=tp, zero=zero, steps=10, lr=1e-3, decay=10.0)
    model = steered("Mixtral")
    folder, before = saved(model, tmp_path), weights_of(model)
    results = ranks4.run(train, folder, job, steered_tokens)
    expected = in_one_process(model, job, steered_tokens)
    for step, number, used in ((0, 0, ODD), (0, 3, EVEN), (1, 0, EVEN), (2, 0, EVEN), (2, 3, ODD)):
        assert experts_of(model, step, number) == {used}  # also after training
    assert {result.numbers for result in results} == {frozenset((0, 1)), frozenset((2, 3))}
    assert_as_one_process(results, before, expected)
    for key in (key for key in before if "experts" in key):
        decayed, idle = before[key] * (1 - job.lr * job.decay) ** job.steps, list(IDLE)
        torch.testing.assert_close(expected.weights[key][idle], decayed[idle], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_routers_have_the_gradient_of_eager_experts(
    ranks4: RankPool, tmp_path: Path, implementation: str
) -> None:
    """In the second step, no token has an expert of the second tensor-parallel rank."""
    job = Job("zb_v", pp=2, tp=2, steps=2, lr=0.01)
    model = steered("Olmoe")
    folder, before = saved(model, tmp_path, experts_implementation=implementation), weights_of(model)
    results = ranks4.run(train, folder, job, steered_tokens)
    expected = in_one_process(model, job, steered_tokens)
    assert [experts_of(model, step, 0) for step in range(job.steps)] == [{ODD}, {EVEN}]
    assert_as_one_process(results, before, expected, "mlp.")  # gradients of k_proj are rounding errors


# --- norm of divided experts (#5259, #8475; Megatron-LM#5916 and others, Automodel#3816) ---

LOUD = 30


def loud(name: str, expert: int) -> Any:
    """Return a decoder whose expert of a number has larger gradients than the others, in its second product."""
    model = decoder(name)
    with torch.no_grad():
        for layer in model.model.layers:
            gate_up, down = (
                getattr(layer.mlp.experts, f"{part}_proj")[expert] for part in ("gate_up", "down")
            )
            up = gate_up[:, 1::2] if name == "GptOss" else gate_up[len(gate_up) // 2 :]
            up *= LOUD
            down /= LOUD
    return model


@pytest.mark.parametrize(
    ("name", "expert", "zero"), [("Mixtral", 0, 0), ("Mixtral", 3, 1), ("GptOss", 0, 1), ("GptOss", 3, 0)]
)
def test_the_norm_counts_the_experts_of_all_ranks(
    ranks4: RankPool, tmp_path: Path, name: str, expert: int, zero: int
) -> None:
    """Most of the norm is that of one expert, of the first or of the second tensor-parallel rank."""
    model, whole = loud(name, expert), Job("1f1b", pp=2, tp=2, zero=zero)
    folder, before = saved(model, tmp_path), weights_of(model)
    unclipped = in_one_process(model, whole, micro_batch)
    of_expert = [g[expert].norm() for key, g in unclipped.gradients.items() if "experts" in key]
    assert float(torch.stack(of_expert).norm()) > 0.6 * unclipped.norms[0]
    job = whole._replace(clip=unclipped.norms[0] / 2)
    results = ranks4.run(train, folder, job, micro_batch)
    assert_as_one_process(results, before, in_one_process(loud(name, expert), job, micro_batch))
