"""LoRA in decoders from transformers, and stages without trained parameters."""

from __future__ import annotations

import os
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_ext
from ds_ext.__main__ import main
from ds_ext.engine.parameters import parameters_of
from ds_ext.errors import ConfigError
from tests.chat_folders import write_tokenizer
from tests.decoder_models import config_of, mean_loss, micro_batch, save_decoder
from tests.distributed.test_own_layers import Batches
from tests.losses import learned
from tests.ranks import RankPool, Ranks
from tests.selection import covering, select

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")
load_file: Any = pytest.importorskip("safetensors.torch").load_file

STEPS, MICRO_BATCHES, LR = 3, 8, 0.5
SCHEDULES, TIED = ("1f1b", "bitpipe_zb", "zb_h1"), "Gemma2"
CASES = covering(list(product(("Llama", TIED), SCHEDULES, (2, 4), (0, 1))), 1)


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **changes)


class Run:
    """Engine of this rank for a decoder with adapters."""

    def __init__(
        self,
        folder: str,
        schedule: str,
        pp: int,
        config: Any = None,
        by_name: bool = False,
        **sections: Any,
    ) -> None:
        """Build it; ``by_name`` selects the parameters of the optimizer as scripts for peft do."""
        self.config = config or lora()
        layers, loss_fn = ds_ext.from_transformers(folder, lora=self.config)
        self.cut = layers[1].module_args[1]
        sections = {"optimizer": {"type": "SGD", "params": {"lr": LR}}, **sections}
        sections["zero_allow_untested_optimizer"] = True
        settings = config_of(schedule, pp, MICRO_BATCHES, **sections)
        self.module = ds_ext.PipelineModule(layers, settings, loss_fn=loss_fn, partition_method="uniform")
        named = [p for name, p in self.module.named_parameters() if not by_name or "lora_" in name]
        self.engine, *_ = ds_ext.initialize(model=self.module, model_parameters=named, config=settings)
        self.batches = Batches(micro_batch)  # pyright: ignore[reportArgumentType]

    def trained(self) -> dict[str, Tensor]:
        """Return the trained parameters of this rank by their names in the model."""
        return {
            self.cut.name_of(local.layer, local.key): local.parameter.detach().clone()
            for local in parameters_of(self.module, 1).values()
            if local.parameter.requires_grad
        }

    def losses(self, steps: int = STEPS) -> list[float]:
        return [float(self.engine.train_batch(self.batches)) for _ in range(steps)]


def train(rank: int, folder: str, schedule: str, pp: int, zero: int) -> tuple[Any, ...]:
    """Return (initial adapters, losses, final adapters, deferred share) of this rank."""
    run = Run(folder, schedule, pp, zero_optimization={"stage": zero})
    initial, losses = run.trained(), run.losses()
    run.engine.transport.close()
    return initial, losses, run.trained(), run.engine.deferred_share


def together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the parameters of all ranks. Replicas must have the same ones."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


def in_one_process(
    folder: str, initial: dict[str, Tensor], config: Any = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train peft's own model from the same initial adapters."""
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(folder), config or lora()
    ).train()
    named = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters() if p.requires_grad}
    assert named.keys() == initial.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(initial[name])
    optimizer, losses = torch.optim.SGD(named.values(), lr=LR), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(mean_loss(model, step, MICRO_BATCHES))
        optimizer.step()
    less = "the shifts of the samples change the loss more than three steps of adapters"
    return learned(losses, less), {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.parametrize(("name", "schedule", "pp", "zero"), CASES)
def test_adapters_train_as_in_pefts_model(
    ranks: Ranks, name: str, schedule: str, pp: int, zero: int, tmp_path: Path
) -> None:
    folder = save_decoder(name, tmp_path)
    results = ranks(pp).run(train, folder, schedule, pp, zero, timeout_s=120)
    initial, final = (together([result[place] for result in results]) for place in (0, 2))
    losses, expected = in_one_process(folder, initial)
    for _, found, _, share in results:
        assert found == pytest.approx(losses, rel=1e-5)
        assert share == (None if schedule == "1f1b" else 1.0)
    assert final.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(final[key], tensor, rtol=1e-4, atol=1e-6, msg=key)


# Fields of LoraConfig by effect, with values other than the defaults.
FIELDS: dict[str, dict[str, Any]] = {
    "exclude_modules": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "rank_pattern alpha_pattern": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"down_proj": 3},
    },
    "layers_to_transform layers_pattern": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "use_rslora": {"use_rslora": True},
    "lora_bias": {"lora_bias": True},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["input_layernorm"]},
    "target_parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    "velora_config": {"velora_config": {}},
    "kasa_config": {"kasa_config": {}},
    "use_qalora qalora_group_size": {"use_qalora": True, "qalora_group_size": 4},
    "ensure_weight_tying": {"ensure_weight_tying": True},
}


def lora_of(case: str) -> Any:
    return peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **FIELDS[case]}
    )


def train_with(rank: int, folder: str, case: str, target: str) -> tuple[Any, ...]:
    """Return (initial adapters, losses, next loss) of this rank, and save the adapter before the last one."""
    run = Run(folder, "zb_h1", 2, lora_of(case))
    initial, losses = run.trained(), run.losses()
    ds_ext.save_adapter(run.engine, run.config, target)
    return initial, losses, run.losses(1)[0]


@pytest.mark.parametrize(
    "case",
    select(
        [*FIELDS],
        [
            *("exclude_modules", "rank_pattern alpha_pattern", "use_dora", "modules_to_save"),
            *("target_parameters", "ensure_weight_tying"),
        ],
    ),
)
def test_fields_of_the_config_are_pefts(ranks2: RankPool, case: str, tmp_path: Path) -> None:
    folder, target = save_decoder("Llama", tmp_path / "model"), str(tmp_path / "adapter")
    results = ranks2.run(train_with, folder, case, target, timeout_s=120)
    losses, _ = in_one_process(folder, together([initial for initial, _, _ in results]), lora_of(case))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    next_loss = mean_loss(peft.PeftModel.from_pretrained(model, target), STEPS, MICRO_BATCHES, backward=False)
    for _, found, found_next in results:
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_next == pytest.approx(next_loss, rel=1e-5)


def counts(rank: int, folder: str, jobs: list[tuple[str, int]]) -> list[tuple[int, int, str]]:
    """Return the parameters and the trained parameters of the model, and the plan, of every job."""
    found = []
    for schedule, pp in jobs:
        run = Run(folder, schedule, pp)
        facts = run.engine.run_facts
        found.append((facts["parameters"], facts["trained_parameters"], facts["plan"]))
        run.engine.transport.close()
    return found


def test_the_plan_counts_every_parameter_once(ranks2: RankPool, tmp_path: Path) -> None:
    """With adapters, two replicas of the model, and an embedding that is also the head."""
    folder = save_decoder(TIED, tmp_path)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), lora())
    trained, total = model.get_nb_trainable_parameters()
    first, second = ranks2.run(counts, folder, [("1f1b", 2), ("bitpipe", 2), ("1f1b", 1)], timeout_s=240)
    for one, other in zip(first, second, strict=True):
        assert one[:2] == other[:2] == (total, trained)
        (line,) = (line for line in one[2].splitlines() if line.startswith("model "))
        assert f"{total:,} " in line and f" {trained:,} " in line


def initial_adapters(rank: int, folder: str, schedule: str) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    return Run(folder, schedule, 2).trained()


def test_initial_adapters_do_not_depend_on_the_schedule(ranks2: RankPool, tmp_path: Path) -> None:
    folder = save_decoder("Llama", tmp_path)
    first, second = (together(ranks2.run(initial_adapters, folder, s)) for s in ("1f1b", "bitpipe"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- stages without trained parameters ---


def train_last_layer(rank: int, folder: str, jobs: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Return (number of trained parameters on this rank, losses) of jobs that train the last decoder layer only."""
    found = []
    for schedule, sections in jobs:
        run = Run(folder, schedule, 2, lora(layers_to_transform=[3]), **sections)
        found.append((len(run.trained()), run.losses(2)))
        run.engine.transport.close()
    return found


def test_stages_without_trained_parameters(ranks2: RankPool, tmp_path: Path) -> None:
    folder, bf16 = save_decoder("Llama", tmp_path), {"enabled": True}
    jobs: list[tuple[str, dict[str, Any]]] = [
        *((schedule, {}) for schedule in ("1f1b", "zb_h1", "bitpipe_zb", "dpp")),
        ("1f1b", {"by_name": True}),
        ("1f1b", {"zero_optimization": {"stage": 1}}),
        ("zb_h1", {"zero_optimization": {"stage": 1}, "bf16": bf16}),
        ("1f1b", {"bf16": bf16, "gradient_clipping": 1.0}),
    ]
    results = ranks2.run(train_last_layer, folder, jobs, timeout_s=240)
    counts = [count for count, _ in results[0]]
    assert counts[0] == 0 and results[1][0][0] > 0  # the first rank of 1f1b trains nothing
    for (schedule, sections), (_, losses) in zip(jobs, results[0], strict=True):
        expected = results[0][0][1]
        assert losses == pytest.approx(expected, rel=2e-2 if "bf16" in sections else 1e-5), schedule
        assert losses[1] != losses[0]


def omit_parameters(rank: int, folder: str) -> str:
    """Give the optimizer no parameter on the first rank, although it trains some."""
    settings = config_of("1f1b", 2, MICRO_BATCHES, optimizer={"type": "SGD", "params": {"lr": LR}})
    layers, loss_fn = ds_ext.from_transformers(folder, lora=lora())
    module = ds_ext.PipelineModule(layers, settings, loss_fn=loss_fn, partition_method="uniform")
    with pytest.raises(ConfigError) as raised:
        ds_ext.initialize(model=module, model_parameters=module.parameters() if rank else [], config=settings)
    return str(raised.value)


def test_an_optimizer_without_parameters_on_one_rank_is_refused_on_all(
    ranks2: RankPool, tmp_path: Path
) -> None:
    messages = ranks2.run(omit_parameters, save_decoder("Llama", tmp_path), timeout_s=120)
    assert messages[0] == messages[1] and re.search(r"^model_parameters: .*\b0\b", messages[0])


# --- checkpoints and adapters ---


def save(rank: int, folder: str, target: str) -> tuple[float, list[str]]:
    """Train, save the trained parameters and the adapter. Return the next loss, and the trained parameters."""
    run = Run(folder, "1f1b", 2)
    run.losses(2)
    run.engine.save_checkpoint(target, tag="trained", exclude_frozen_parameters=True)
    ds_ext.save_adapter(run.engine, run.config, f"{target}/adapter")
    loss = run.losses(1)[0]
    run.engine.transport.close()
    return loss, sorted(run.trained())


def load(rank: int, folder: str, target: str, schedule: str) -> float:
    run = Run(folder, schedule, 4)
    run.engine.load_checkpoint(target, tag="trained")
    run.batches.step = 2
    loss = run.losses(1)[0]
    run.engine.transport.close()
    return loss


def test_a_checkpoint_of_trained_parameters_and_the_adapter_give_the_next_loss(
    ranks: Ranks, tmp_path: Path
) -> None:
    folder, target = save_decoder("Llama", tmp_path / "model"), tmp_path / "saved"
    expected = ranks(2).run(save, os.path.relpath(folder), str(target), timeout_s=120)[0][0]
    frozen = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    layers = target / "trained"
    tensors = [torch.load(file) for file in layers.glob("layer_*.pt")]
    keys = {key for state in tensors for key in state}
    assert keys and all("lora_" in key for key in keys)
    assert sum(t.numel() * 4 for state in tensors for t in state.values()) < frozen / 4
    for schedule in ("bitpipe_zb", "1f1b"):
        assert ranks(4).run(load, folder, str(target), schedule, timeout_s=120)[0] == pytest.approx(expected)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(base, target / "adapter")
    assert mean_loss(model, 2, MICRO_BATCHES, backward=False) == pytest.approx(expected, rel=1e-5)
    # The adapter names its model, which peft then finds alone, from any folder.
    config = peft.LoraConfig.from_pretrained(target / "adapter")
    assert (config.base_model_name_or_path, config.task_type) == (folder, "CAUSAL_LM")


def save_all_weights(rank: int, folder: str, target: str) -> float:
    """Train all weights, save them, and return the next loss."""
    layers, loss_fn = ds_ext.from_transformers(folder)
    settings = config_of("1f1b", 2, MICRO_BATCHES, optimizer={"type": "SGD", "params": {"lr": LR}})
    module = ds_ext.PipelineModule(layers, settings, loss_fn=loss_fn)
    engine, *_ = ds_ext.initialize(model=module, model_parameters=module.parameters(), config=settings)
    batches = Batches(micro_batch)  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        engine.train_batch(batches)
    engine.save_checkpoint(target)
    loss = float(engine.train_batch(batches))
    engine.transport.close()
    return loss


@pytest.mark.parametrize("name", ["Llama", TIED])
def test_the_lines_back_to_transformers(
    ranks2: RankPool, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and adapter of docs/hugging_face.md, as a folder of the model."""
    monkeypatch.chdir(tmp_path)
    folder = save_decoder(name, tmp_path / "MODEL")
    write_tokenizer(tmp_path / "MODEL", None)
    page = (Path(__file__).parents[2] / "docs" / "hugging_face.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    merged = next(block for block in blocks if "merge_and_unload" in block)
    scope = {"peft": peft, "transformers": transformers, "torch": torch, "ds_ext": ds_ext}
    weights = ranks2.run(save_all_weights, folder, str(tmp_path / "finetuned"), timeout_s=120)[0]
    (words,) = (
        line.split() for line in page.splitlines() if "--hf-model MODEL" in line and " convert " in line
    )
    assert main(words[words.index("ds_ext") + 1 :]) == 0
    shutil.rmtree("finetuned")
    adapted = ranks2.run(save, folder, str(tmp_path / "finetuned"), timeout_s=120)[0][0]
    for code, expected in (("", weights), (merged, adapted)):
        exec(code, scope)
        model = transformers.AutoModelForCausalLM.from_pretrained("trained", dtype=torch.float32)
        assert mean_loss(model, 2, MICRO_BATCHES, backward=False) == pytest.approx(expected, rel=1e-5)
        assert transformers.AutoTokenizer.from_pretrained("trained").encode("one")
        shutil.rmtree("trained")


def save_magnitudes_and_biases(rank: int, folder: str, target: str) -> float:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, bias="lora_only")
    run = Run(folder, "bitpipe_zb", 2, config)
    run.losses(2)
    ds_ext.save_adapter(run.engine, run.config, target)
    loss = run.losses(1)[0]
    run.engine.transport.close()
    return loss


def test_the_adapter_has_magnitudes_and_biases(ranks2: RankPool, tmp_path: Path) -> None:
    folder, target = save_decoder("Starcoder2", tmp_path / "model"), tmp_path / "adapter"
    expected = ranks2.run(save_magnitudes_and_biases, folder, str(target), timeout_s=120)[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(base, target)
    assert mean_loss(model, 2, MICRO_BATCHES, backward=False) == pytest.approx(expected, rel=1e-5)
    saved = load_file(target / "adapter_model.safetensors")
    model.save_pretrained(tmp_path / "own")  # peft's own names
    own = load_file(tmp_path / "own" / "adapter_model.safetensors")
    assert saved.keys() == own.keys() and any(name.endswith("base_layer.bias") for name in saved)
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, saved[name], msg=name)
