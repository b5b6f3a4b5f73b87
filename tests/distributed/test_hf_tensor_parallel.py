"""Decoders of transformers in tensor-parallel shards train to the model's own losses, gradients and norms."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ds_ext
from ds_ext.__main__ import main
from ds_ext.engine.parameters import parameters_of
from ds_ext.planner.memory import memory
from ds_ext.recipes.training.hf_model import config_of_model
from ds_ext.recipes.training.job import TrainingJob
from tests.decoder_models import (
    EXPERTS_MODELS,
    HEADS_OF_8,
    LAYERS,
    MODELS,
    MORE_MODELS,
    PLANNED_MODELS,
    ROUTERS_LOSS,
    config_of,
    mean_loss,
    micro_batch,
    random_decoder,
    save_decoder,
)
from tests.distributed.test_own_layers import Batches
from tests.precisions import needs
from tests.ranks import Ranks
from tests.reference import assert_close_gradients
from tests.selection import EVERYTHING, select

transformers: Any = pytest.importorskip("transformers")
load_file: Any = pytest.importorskip("safetensors.torch").load_file

MICRO_BATCHES, LR = 4, 0.1
Job = tuple[str, int, int]  # schedule, sizes of pipeline and tensor parallelism


def decoder(name: str) -> Any:
    return random_decoder(name.split()[0], **FAMILIES[name])


class Result(NamedTuple):
    """Results of a step with SGD. Tensors of a rank are (tensor-parallel rank, shard, its dimension, whole size)."""

    loss: float
    norm: float
    gradients: dict[str, Any]
    weights: dict[str, Any]


def loss_in_fp64(logits_BSV: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the model's loss without its rounding to fp32: the sum and the number of labels."""
    targets_BS = labels_BS[:, 1:]
    losses = nn.functional.cross_entropy(logits_BSV[:, :-1].mT, targets_BS, reduction="sum")
    return losses, (targets_BS != -100).sum()


@cache
def in_one_process(name: str, dtype: torch.dtype = torch.float32) -> Result:
    """Return the results of the model's own forward, or with an own loss in fp64."""
    model = decoder(name).train().to(dtype)
    if dtype == torch.float64:
        batches = [micro_batch(0, number) for number in range(MICRO_BATCHES)]
        pairs = [loss_in_fp64(model(*inputs).logits, labels_BS) for inputs, labels_BS in batches]
        total: Any = sum(losses for losses, _ in pairs) / sum(count for _, count in pairs)
        total.backward()
        loss = total.item()
    else:
        loss = mean_loss(model, 0, MICRO_BATCHES)
    trained = {key: p for key, p in model.named_parameters() if p.grad is not None}
    gradients: Any = {key: p.grad for key, p in trained.items()}
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    return Result(
        loss, float(norm), gradients, {key: p.detach() - LR * gradients[key] for key, p in trained.items()}
    )


def train(rank: int, folders: dict[str, str], job: Job, dtype: torch.dtype, sequence: bool) -> dict[str, Any]:
    return {name: train_one(folder, job, dtype, sequence) for name, folder in folders.items()}


def train_one(folder: str, job: Job, dtype: torch.dtype, sequence: bool) -> Result | str:
    """Return the results of this rank, or a refusal."""
    schedule, pp, tp = job
    try:
        layers, loss_fn = ds_ext.from_transformers(folder, dtype=dtype)
        config = config_of(schedule, pp, MICRO_BATCHES)
        config["ds_ext"] |= {"tensor_parallel_size": tp, "sequence_parallel": sequence}
        config["train_batch_size"] //= tp  # counted for groups of one rank
        loss: Any = loss_in_fp64 if dtype == torch.float64 else loss_fn
        module = ds_ext.PipelineModule(layers, config, loss_fn=loss, partition_method="uniform")
    except ds_ext.errors.ConfigError as error:
        return str(error)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    split = layers[1].module_args[1]
    _, _, tensor_rank = module.layout.coordinates(torch.distributed.get_rank())

    def tensors(read: Callable[[Any], Tensor | None]) -> dict[str, Any]:
        found = {}
        for local in parameters_of(module, tp).values():
            value = read(local.parameter)
            if value is not None:
                key = split.name_of(local.layer, local.key)
                found[key] = tensor_rank, value.detach().clone(), local.shape.dim, local.shape.full
        return found

    gradients: dict[str, Any] = {}
    optimizer.register_step_pre_hook(lambda *_: gradients.update(tensors(lambda p: p.grad)))
    mean = float(engine.train_batch(Batches(micro_batch)))  # pyright: ignore[reportArgumentType]
    norm = engine.get_global_grad_norm()
    engine.transport.close()
    assert norm is not None
    return Result(mean, float(norm), gradients, tensors(lambda p: p))


def joined(by_rank: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return name -> whole tensor, from the shards of all ranks."""
    shards: dict[str, dict[int, Any]] = {}
    for found in by_rank:
        for key, (tensor_rank, *rest) in found.items():
            shards.setdefault(key, {})[tensor_rank] = rest
    whole = {}
    for key, by_shard in shards.items():
        tensors, (_, dim, full) = [by_shard[r][0] for r in sorted(by_shard)], by_shard[0]
        if dim is None:
            for tensor in tensors[1:]:
                torch.testing.assert_close(tensor, tensors[0], rtol=1e-5, atol=1e-6)
            whole[key] = tensors[0]
        else:
            whole[key] = torch.cat(tensors, dim).narrow(dim, 0, full[dim])
    return whole


def assert_as_one_process(results: list[Result], name: str, dtype: torch.dtype = torch.float32) -> None:
    """Compare loss, norm, gradients and weights after SGD with those of one process."""
    expected = in_one_process(name, dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for result in results:
        assert result.loss == pytest.approx(expected.loss, rel=max(tolerance, 1e-6)), name  # fp32
        assert result.norm == pytest.approx(expected.norm, rel=tolerance), name
    for field in ("gradients", "weights"):
        found, whole = joined([getattr(result, field) for result in results]), getattr(expected, field)
        assert found.keys() == whole.keys(), name
        for key, tensor in found.items():
            assert_close_gradients(tensor, whole[key], f"{name} {field} {key}", tolerance)


REFUSED = (
    *("StableLm", "GPT2", "OPT", "Falcon", "Bloom", "Persimmon", "GPTNeo"),
    *("GPTBigCode", "Mpt", "BioGpt", "XGLM", "Llama4Text", "Apertus"),
)
FAMILIES = {**MODELS, **MORE_MODELS, **PLANNED_MODELS, **EXPERTS_MODELS}
WITH_EXPERTS = ("GptOss", "Mixtral", "Qwen2Moe", *EXPERTS_MODELS)
DIVIDED = [name for name in FAMILIES if name not in REFUSED]
# One of each way to divide; the others run with ``make test-all``.
FEW = ("Llama", "Gemma3Text", "GPTNeoX", "Olmo2", "Phi3", "Cohere", "GPTJ", "Qwen3")
LAYOUTS = [("1f1b", 2, 2), ("bitpipe_zb", 2, 2), ("zb_v", 1, 2), ("1f1b", 1, 4)]


def saved(names: Iterable[str], folder: Path) -> dict[str, str]:
    return {name: save_decoder(name.split()[0], folder / name, **FAMILIES[name]) for name in names}


@pytest.mark.parametrize(("schedule", "pp", "tp"), LAYOUTS)
def test_losses_gradients_and_norms_are_the_models_own(
    ranks: Ranks, schedule: str, pp: int, tp: int, tmp_path: Path
) -> None:
    few = (*FEW, *WITH_EXPERTS[:2], "DeepseekV3", "Olmoe")
    names = DIVIDED if EVERYTHING else few[LAYOUTS.index((schedule, pp, tp)) :: len(LAYOUTS)]
    train_as_one_process(ranks, names, (schedule, pp, tp), tmp_path)


def train_as_one_process(
    ranks: Ranks,
    names: Iterable[str],
    job: Job,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    sequence: bool = False,
) -> None:
    names = [name for name in names if decoder(name).tp_plan]  # an older transformers has fewer plans
    folders, limit = saved(names, folder), 60.0 + 15 * len(names)
    by_rank = ranks(job[1] * job[2]).run(train, folders, job, dtype, sequence, timeout_s=limit)
    for name in names:
        assert_as_one_process([results[name] for results in by_rank], name, dtype)


@pytest.mark.parametrize("job", select([("zb_v", 2, 2), ("1f1b", 1, 2)], [("zb_v", 2, 2)]))
def test_models_that_compute_in_fp64_are_exact(ranks: Ranks, job: Job, tmp_path: Path) -> None:
    """RMS norms of transformers compute in fp32."""
    train_as_one_process(ranks, ["GPTNeoX", "Phi", "Starcoder2"], job, tmp_path, torch.float64)


@pytest.mark.parametrize("job", [("zb_v", 2, 2), ("bitpipe_zb", 2, 2)])
def test_sequence_parallelism_computes_the_same(ranks: Ranks, job: Job, tmp_path: Path) -> None:
    names = FEW[len(job[0]) % 2 :: 4]
    if EVERYTHING:
        names = [name for name in DIVIDED if name not in WITH_EXPERTS]
    train_as_one_process(ranks, names, job, tmp_path, sequence=True)


def test_models_without_exact_shards_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    folders = saved(REFUSED, tmp_path)
    limit = 60.0 + 15 * len(REFUSED)
    for by_name in ranks(2).run(train, folders, ("1f1b", 1, 2), torch.float32, False, timeout_s=limit):
        assert all(
            isinstance(refusal, str) and "tensor_parallel_size" in refusal for refusal in by_name.values()
        )


def refusal_without(rank: int, folder: str, module: str) -> str:
    """Return the error of a plan that leaves a module of attention out."""
    layers, loss_fn = ds_ext.from_transformers(folder)
    plan = layers[1].module_args[1].plan
    del plan[f"model.layers.*.self_attn.{module}"]
    config = config_of("1f1b", 1, MICRO_BATCHES)
    config["ds_ext"]["tensor_parallel_size"] = 2
    config["train_batch_size"] //= 2
    try:
        ds_ext.PipelineModule(layers, config, loss_fn=loss_fn)
    except ds_ext.errors.ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("module", "problem"), [("o_proj", "shape"), ("q_norm", r"gradient of self_attn\.q_norm\.weight")]
)
def test_a_plan_that_does_not_fit_the_code_is_refused(
    ranks: Ranks, tmp_path: Path, module: str, problem: str
) -> None:
    """The second one would train: only the gradients of a norm would be those of the heads of one rank."""
    folder = save_decoder("Qwen3", tmp_path / "model", **HEADS_OF_8)
    for refusal in ranks(2).run(refusal_without, folder, module, timeout_s=60):
        assert re.search(problem, refusal), refusal


# --- features, against one shard ---

FEATURES: dict[str, tuple[str, Job, dict[str, Any], dict[str, Any]]] = {
    "chunked loss": ("Llama", ("zb_v", 2, 2), {"chunked_loss": True}, {}),
    "chunked loss, tied": ("Gemma3Text", ("1f1b", 1, 4), {"chunked_loss": True}, {}),
    "head in parts": ("Llama", ("bitpipe_zb", 2, 2), {}, {"vocabulary_parallel_head": True}),
    "slices": ("Llama", ("1f1b", 2, 2), {}, {"sequence_slices": 2}),
    "recomputation": (
        "Gemma3Text",
        ("bitpipe_zb", 2, 2),
        {},
        {"pipeline": {"activation_checkpoint_interval": 1}},
    ),
    "bf16": ("Llama", ("zb_v", 2, 2), {}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
    "ZeRO-1 and clipping": (
        *("Gemma3Text", ("bitpipe", 2, 2), {}),
        {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5},
    ),
    "slices with common heads": ("Llama", ("1f1b", 1, 4), {}, {"sequence_slices": 2}),
    "tokens, recomputed": (
        *("Gemma3Text", ("bitpipe_zb", 2, 2), {"chunked_loss": True}),
        {"sequence_parallel": True, "pipeline": {"activation_checkpoint_interval": 1}},
    ),
    "tokens, head in parts": (
        *("Llama", ("zb_v", 2, 2), {}),
        {
            **{"sequence_parallel": True, "vocabulary_parallel_head": True},
            **{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5},
        },
    ),
    "adapters": ("Llama", ("zb_v", 2, 2), {"lora": {"r": 4, "target_modules": "all-linear"}}, {}),
    "adapters with common heads": (
        "Llama",
        ("1f1b", 1, 4),
        {"lora": {"r": 4, "target_modules": "all-linear"}},
        {},
    ),
    "experts, recomputed": (
        *("Mixtral", ("bitpipe_zb", 2, 2), {"chunked_loss": True}),
        {
            **{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5},
            "pipeline": {"activation_checkpoint_interval": 1},
        },
    ),
    "experts in slices": ("GptOss", ("1f1b", 1, 4), {}, {"sequence_slices": 2}),
    "experts beside adapters": (
        *("Qwen3Moe", ("zb_v", 2, 2), {"lora": {"r": 4, "target_modules": ["q_proj", "o_proj"]}}),
        {"vocabulary_parallel_head": True},
    ),
    "experts and the loss of routers": ("Olmoe", ("zb_v", 1, 2), {}, {}),
    "whole outputs": (
        "Olmo2",
        ("zb_v", 2, 2),
        {"lora": {"r": 4, "target_modules": ["q_proj", "o_proj"]}},
        {},
    ),
}
# They contain every feature once.
FEW_FEATURES = [
    *(
        "chunked loss, tied",
        "bf16",
        "slices with common heads",
        "tokens, recomputed",
        "tokens, head in parts",
    ),
    *("adapters with common heads", "whole outputs", "experts, recomputed", "experts in slices"),
]
CHANGES: dict[str, dict[str, Any]] = {"Llama": {"tie_word_embeddings": False}, "Olmoe": ROUTERS_LOSS}
OF_SHARDS = ("vocabulary_parallel_head", "sequence_parallel")
SECTIONS = ("bf16", "zero_optimization", "gradient_clipping", "pipeline")


def losses_of(
    rank: int, folder: str, job: Job, arguments: dict[str, Any], settings: dict[str, Any], saved: str
) -> Any:
    """Return the losses and norms of three steps, the loss of an evaluation, and its logits."""
    schedule, pp, tp = job
    arguments = dict(arguments)
    if "lora" in arguments:
        from peft import LoraConfig

        arguments["lora"] = LoraConfig(**arguments["lora"])
    layers, loss_fn = ds_ext.from_transformers(folder, **arguments)
    config = config_of(schedule, pp, MICRO_BATCHES)
    config |= {key: settings[key] for key in SECTIONS if key in settings}
    config["ds_ext"]["tensor_parallel_size"] = tp
    config["ds_ext"] |= {key: value for key, value in settings.items() if key not in SECTIONS}
    config["train_batch_size"] //= tp
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    batches: Any = Batches(micro_batch)  # pyright: ignore[reportArgumentType]
    steps = []
    for _ in range(3):
        loss = float(engine.train_batch(batches))
        norm = engine.get_global_grad_norm()
        steps.append((loss, None if norm is None else float(norm)))
    whole_logits = "vocabulary_parallel_head" not in settings
    evaluated = engine.eval_batch(batches, return_logits=whole_logits)
    if saved:
        from ds_ext.hf.export import save_adapter

        save_adapter(engine, arguments["lora"], saved)
    engine.transport.close()
    return steps, float(evaluated[0] if whole_logits else evaluated), evaluated[1] if whole_logits else None


@pytest.mark.parametrize(
    "feature",
    [pytest.param(f, marks=needs("bf16") if f == "bf16" else ()) for f in select([*FEATURES], FEW_FEATURES)],
)
def test_features_compute_as_in_one_shard(ranks: Ranks, feature: str, tmp_path: Path) -> None:
    name, job, arguments, settings = FEATURES[feature]
    folder = save_decoder(name, tmp_path / name, **{**FAMILIES[name], **CHANGES.get(name, {})})
    whole = ("1f1b", 1, 1)
    folders = [str(tmp_path / f"adapter_{n}") if "lora" in arguments else "" for n in range(2)]
    shared = {key: value for key, value in settings.items() if key not in OF_SHARDS}
    tolerance = 2e-2 if "bf16" in settings else 2e-4
    (expected,) = ranks(1).run(losses_of, folder, whole, arguments, shared, folders[0], timeout_s=120)
    for steps, loss, logits in ranks(job[1] * job[2]).run(
        losses_of, folder, job, arguments, settings, folders[1], timeout_s=120
    ):
        for step, expected_step in zip(steps, expected[0], strict=True):
            assert step == pytest.approx(expected_step, rel=tolerance)
        assert loss == pytest.approx(expected[1], rel=tolerance)
        for number, values in (
            {} if "bf16" in settings else logits or {}
        ).items():  # it rounds in another order
            torch.testing.assert_close(values, expected[2][number], rtol=5 * tolerance, atol=5 * tolerance)
    if "lora" in arguments:
        ours, theirs = (load_file(f"{folders[n]}/adapter_model.safetensors") for n in (1, 0))
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=2e-4)


# --- checkpoints ---


def steps_of(rank: int, folder: str, job: Job, lr: float, steps: int, load: str, save: str) -> list[float]:
    """Return the losses of steps after loading a checkpoint, and save one."""
    schedule, pp, tp = job
    layers, loss_fn = ds_ext.from_transformers(folder)
    config = config_of(schedule, pp, MICRO_BATCHES)
    config["ds_ext"]["tensor_parallel_size"] = tp
    config["train_batch_size"] //= tp
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.0)
    engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    if load:
        assert engine.load_checkpoint(load)[0] is not None
    batches: Any = Batches(micro_batch)  # pyright: ignore[reportArgumentType]
    losses = [float(engine.train_batch(batches)) for _ in range(steps)]
    if save:
        engine.save_checkpoint(save)
    engine.transport.close()
    return losses


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "Mixtral", "GptOss"])
def test_a_checkpoint_of_shards_becomes_the_folder(ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder, saved, output = (str(tmp_path / part) for part in ("model", "saved", "trained"))
    save_decoder(name, Path(folder), **FAMILIES[name])
    ranks(4).run(steps_of, folder, ("bitpipe_zb", 2, 2), 0.0, 1, "", saved, timeout_s=90)
    assert main(["convert", saved, "--to", "hf", output, "--hf-model", folder]) == 0
    before, after = (
        {p: w for f in sorted(Path(d).glob("*.safetensors")) for p, w in load_file(f).items()}
        for d in (folder, output)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[key]) for key, weight in before.items())


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_a_checkpoint_fits_any_number_of_shards(ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder = save_decoder(name, tmp_path / "model")

    def chain(*jobs: Job) -> list[float]:
        losses, load = [], ""
        for number, job in enumerate(jobs):
            save = str(tmp_path / f"{len(jobs)}_{job[2]}_{number}")
            by_rank = ranks(job[1] * job[2]).run(steps_of, folder, job, 1e-2, 2, load, save, timeout_s=90)
            losses += by_rank[0]
            load = save
        return losses

    expected = chain(*[("1f1b", 1, 1)] * 3)
    assert chain(("zb_v", 2, 2), ("bitpipe_zb", 2, 1), ("1f1b", 1, 4)) == pytest.approx(expected, rel=2e-4)


# --- memory ---


def bytes_of_devices(rank: int, folder: str) -> Any:
    """Return (planned, measured) bytes of weights, gradients and states of the optimizer on this rank."""
    layers, loss_fn = ds_ext.from_transformers(folder)
    config = config_of("1f1b", 2, MICRO_BATCHES)
    config["ds_ext"]["tensor_parallel_size"] = 2
    config["train_batch_size"] //= 2
    config["optimizer"] = {"type": "Adam", "params": {"lr": LR, "torch_adam": True}}
    boundaries, ends = [0, 4, LAYERS + 4], (["embedding", "positions"], ["final norm", "head"])
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method=boundaries)
    optimizer = torch.optim.Adam(module.parameters(), lr=LR)
    engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    model = config_of_model(Path(folder), "transformers")
    job = TrainingJob(Namespace(hosts=None), module.plan, model, *ends, boundaries)

    def size(tensors: Iterable[Tensor | None]) -> int:
        return sum(t.nbytes for t in tensors if t is not None)

    gradients: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(size(p.grad for p in module.parameters())))
    engine.train_batch(Batches(micro_batch))  # pyright: ignore[reportArgumentType]
    engine.transport.close()
    states = size(t for state in optimizer.state.values() for t in state.values())
    planned = memory(module.plan.timetable, job.sizes)[module.device_index]
    measured = size(module.parameters()), gradients[0], states
    return (planned.weights, planned.gradients, planned.optimizer), measured


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3Text", "Qwen3Moe"])
def test_ranks_have_the_bytes_of_the_plan(ranks: Ranks, tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}
    folder = save_decoder(name, tmp_path / name, **{**FAMILIES[name], **HEADS_OF_8, **sizes})
    for planned, measured in ranks(4).run(bytes_of_devices, folder, timeout_s=90):
        assert measured == pytest.approx(planned, rel=0.05), (planned, measured)
