"""Cuts of transformers decoders: parity in one process, reading of folders, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.engine.module_plan import head_parts
from ds_ext.errors import ConfigError
from ds_ext.hf.find import find_split
from ds_ext.hf.folder import ModelFolder
from ds_ext.hf.lora import Adapters, lora_config
from ds_ext.hf.weights import make_source
from ds_ext.recipes.data.chat.dataset import pad_conversations
from ds_ext.recipes.data.packing import IGNORE_INDEX
from tests.decoder_models import (
    EXPERTS_MODELS,
    GROUPED,
    SIZES,
    WORDS,
    micro_batch,
    random_decoder,
    save_decoder,
)
from tests.losses import mean

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")


def chain(layers: list[LayerSpec]) -> Any:
    """Build all layers in this process, and return the function from inputs to logits."""
    tied: dict[str, nn.Module] = {}
    calls: list[Any] = []
    for spec in layers:
        if isinstance(spec, TiedLayerSpec):
            module = tied.get(spec.key) or tied.setdefault(spec.key, spec.build())
            calls.append(partial(spec.forward_fn, module))
        else:
            calls.append(spec.build())

    def run(inputs: Any) -> Tensor:
        for call in calls:
            inputs = call(inputs)
        return inputs

    return run


@pytest.mark.parametrize(
    ("name", "attention"), [("GPT2", "sdpa"), ("Gemma3Text", "eager"), ("Mixtral", "sdpa")]
)
def test_a_model_in_memory_is_used_and_not_copied(name: str, attention: str) -> None:
    model = random_decoder(name).train()
    model.set_attn_implementation(attention)
    layers, loss_fn = ds_ext.from_transformers(model)
    inputs, labels_BS = micro_batch(0, 1)
    expected = model(input_ids=inputs[0], attention_mask=inputs[1], labels=labels_BS).loss
    expected.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    loss = mean(loss_fn(chain(layers)(inputs), labels_BS))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], msg=key)


# A head with its own weight, a tied one, and a frozen model with adapters.
@pytest.mark.parametrize(("name", "lora"), [("Llama", False), ("GPT2", False), ("Mixtral", True)])
def test_a_chunked_loss_has_the_models_loss_and_gradients(name: str, lora: bool) -> None:
    results = []
    for chunked in (True, False):
        model = random_decoder(name).train()
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False) if lora else None
        torch.manual_seed(1)
        layers, loss_fn = ds_ext.from_transformers(model, lora=config, chunked_loss=chunked)
        inputs, labels_BS = micro_batch(0, 1)
        outputs = chain(layers)(inputs)
        loss = mean(loss_fn(outputs, labels_BS))
        loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), gradients, loss_fn.return_logits(outputs).detach()))
        assert outputs.shape[-1] == (32 if chunked else WORDS)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Gemma2", "final_logit_softcapping 30"),
        ("Cohere", "logit_scale 0.0625"),
        ("Granite", "logits_scaling 2"),
        ("Phi", "bias of 67"),
    ],
)
def test_a_head_that_changes_its_logits_has_no_chunked_loss_and_no_parts(name: str, values: str) -> None:
    assert_needs_whole_logits(random_decoder(name, tie_word_embeddings=False), rf"{name}Config.*{values}")


def assert_needs_whole_logits(model: Any, problem: str) -> None:
    """Whole logits work; a chunked loss and parts are refused with the problem."""
    with pytest.raises(ConfigError, match=rf"chunked_loss: .*{problem}"):
        ds_ext.from_transformers(model, chunked_loss=True)
    layers, loss_fn = ds_ext.from_transformers(model)
    with pytest.raises(ConfigError, match=rf"vocabulary_parallel_head: .*{problem}"):
        head_parts(layers, loss_fn, 2)


def test_a_head_with_adapters_has_no_chunked_loss_and_no_parts() -> None:
    model = peft.get_peft_model(random_decoder("Llama"), peft.LoraConfig(target_modules=["lm_head"]))
    assert_needs_whole_logits(model, r"peft\.tuners\.lora")


def test_a_tied_head_has_no_parts() -> None:
    layers, loss_fn = ds_ext.from_transformers(random_decoder("Llama", tie_word_embeddings=True))
    with pytest.raises(ConfigError, match=r"vocabulary_parallel_head: .*LlamaConfig"):
        head_parts(layers, loss_fn, 2)


def test_another_loss_than_cross_entropy_has_no_chunked_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_decoder("Llama")
    plain = model.loss_function

    def doubled(*args: Any, **kwargs: Any) -> Tensor:
        return 2 * plain(*args, **kwargs)

    monkeypatch.setattr(type(model), "loss_function", property(lambda _: doubled))
    with pytest.raises(ConfigError, match=r"chunked_loss: LlamaConfig.*cross entropy"):
        ds_ext.from_transformers(model, chunked_loss=True)


HOOKS: dict[str, Callable[[nn.Linear], object]] = {
    "hook": lambda head: head.register_forward_hook(lambda *_: None),
    "pre-hook": lambda head: head.register_forward_pre_hook(lambda *_: None),
    "forward": lambda head: setattr(head, "forward", head.forward),
    "gradient hook": lambda head: head.weight.register_hook(lambda grad: 2 * grad),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_parts_of_a_head_with_hooks_are_refused(hook: str) -> None:
    model = random_decoder("Llama")
    HOOKS[hook](model.get_output_embeddings())
    if hook != "gradient hook":  # which a chunked loss calls
        assert_needs_whole_logits(model, "LlamaConfig")
        return
    layers, loss_fn = ds_ext.from_transformers(model)
    with pytest.raises(ConfigError, match=r"vocabulary_parallel_head: "):
        head_parts(layers, loss_fn, 2)


# 40 parts of 2 rows: some have only padding. GPT-NeoX has another name for its head in a folder.
@pytest.mark.parametrize(("name", "parts"), [("Llama", 4), ("GPTNeoX", 40)])
@pytest.mark.parametrize("in_memory", [False, True])
def test_the_parts_of_a_head_have_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: int, in_memory: bool
) -> None:
    model = random_decoder(name)
    folder = save_decoder(name, tmp_path)
    layers, loss_fn = ds_ext.from_transformers(model if in_memory else folder)
    sizes: list[int] = []
    read_rows = ModelFolder.read_rows

    def reading(self: ModelFolder, name: str, start: int, stop: int) -> Tensor:
        sizes.append(stop - start)
        return read_rows(self, name, start, stop)

    monkeypatch.setattr(ModelFolder, "read_rows", reading)
    monkeypatch.setattr(ModelFolder, "read", lambda *_: pytest.fail("a whole weight is read"))
    heads = [spec.build() for spec in head_parts(layers, loss_fn, parts)]
    assert sum(sizes) == (0 if in_memory else WORDS)
    key = f"skeleton.{layers[1].module_args[1].head}.weight"
    assert all(list(head.state_dict()) == [key] for head in heads)
    weight_VD = model.get_output_embeddings().weight
    rows_VD = torch.cat([head.get_parameter(key) for head in heads])
    assert torch.equal(rows_VD[:WORDS], weight_VD) and not rows_VD[WORDS:].any()
    assert {len(head.get_parameter(key)) for head in heads} == {-(-WORDS // parts)}
    assert {head.get_parameter(key).untyped_storage().nbytes() for head in heads} == {
        -(-WORDS // parts) * 32 * 4
    }


def test_the_parts_of_a_head_that_files_do_not_have_are_refused(tmp_path: Path) -> None:
    folder = Path(save_decoder("Llama", tmp_path))
    layers, loss_fn = ds_ext.from_transformers(folder)
    (spec, *_) = head_parts(layers, loss_fn, 2)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": WORDS + 1}))
    spec.build()
    layers, loss_fn = ds_ext.from_transformers(folder)
    (spec, *_) = head_parts(layers, loss_fn, 2)
    with pytest.raises(ConfigError, match=r"config\.json .*lm_head"):
        spec.build()


@pytest.mark.parametrize("name", ["GPT2", "Mixtral"])
def test_padded_conversations_have_the_losses_of_each(name: str) -> None:
    layers, loss_fn = ds_ext.from_transformers(random_decoder(name))
    run = chain(layers)
    samples = []
    for length in (4, 9):
        ids_S = torch.randint(3, WORDS, (length,), generator=torch.Generator().manual_seed(length))
        samples.append((ids_S, ids_S.where(torch.arange(length) > 1, IGNORE_INDEX)))
    alone = [loss_fn(run(ids_S[None]), labels_S[None]) for ids_S, labels_S in samples]
    ids_BS, labels_BS = pad_conversations(samples)
    total, count = loss_fn(run(ids_BS), labels_BS)
    assert count == sum(count for _, count in alone) == 2 + 7
    torch.testing.assert_close(total, alone[0][0] + alone[1][0])


def test_two_builds_from_a_folder_share_nothing(tmp_path: Path) -> None:
    layers, _ = ds_ext.from_transformers(save_decoder("Llama", tmp_path))
    first, second = (layers[3].build().module.self_attn.q_proj.weight for _ in range(2))
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def test_a_layer_reads_only_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, _ = ds_ext.from_transformers(save_decoder("Mixtral", tmp_path))
    read: list[str] = []
    original = ModelFolder.read

    def reading(self: ModelFolder, name: str) -> Any:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(ModelFolder, "read", reading)
    for spec in layers:
        spec.num_parameters  # counted without reading  # noqa: B018
    assert not read
    layers[3].build()
    assert read and all(key.startswith("model.layers.1.") for key in read)


def test_the_dtype_of_a_folder_and_another_one(tmp_path: Path) -> None:
    folder = save_decoder("Llama", tmp_path)
    for dtype in (None, torch.bfloat16):
        layer: Any = ds_ext.from_transformers(folder, dtype=dtype)[0][2].build()
        assert {p.dtype for p in layer.parameters()} == {dtype or torch.float32}


def test_a_folder_with_a_separate_head_is_not_tied(tmp_path: Path) -> None:
    model = random_decoder("Llama")
    model.config.tie_word_embeddings = True  # contradicts the files, as after a merge of models
    model.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    inputs, labels_BS = micro_batch(0, 0)
    layers, loss_fn = ds_ext.from_transformers(tmp_path)
    expected = model(input_ids=inputs[0], attention_mask=inputs[1], labels=labels_BS).loss
    torch.testing.assert_close(mean(loss_fn(chain(layers)(inputs), labels_BS)), expected)


def test_the_trained_elements_are_those_of_peft(tmp_path: Path) -> None:
    random_decoder("Llama").save_pretrained(tmp_path)
    source = make_source(tmp_path, None)
    expected, _ = peft.get_peft_model(random_decoder("Llama"), lora_config(4)).get_nb_trainable_parameters()
    assert Adapters(lora_config(4), source, find_split(source)).elements == expected > 0


def test_a_model_with_pefts_adapters() -> None:
    model = peft.get_peft_model(random_decoder("Llama"), peft.LoraConfig(target_modules=["q_proj"]))
    layers, _ = ds_ext.from_transformers(model)
    trained = [name for name, p in layers[2].build().named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)


REFUSED: dict[str, dict[str, Any]] = {
    # Two layers share a block.
    "Zamba2": {**GROUPED, "num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2},
    # Layers pass a state to each other.
    "Rwkv": {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4},
    "Bert": {**SIZES, "is_decoder": True},
    "OPT": {**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "layerdrop": 0.1},
    # Its model adds no such loss.
    "DeepseekV3": {**EXPERTS_MODELS["DeepseekV3"], "output_router_logits": True},
    # The tables depend on earlier samples.
    "Llama": {
        **GROUPED,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_cut(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**REFUSED[name])
    with pytest.raises(ConfigError):
        ds_ext.from_transformers(transformers.AutoModelForCausalLM.from_config(config))


def tamper(model: Any, change: Any) -> Any:
    """Return the model with another forward of its backbone; also in its skeletons, which are of the same class."""
    original = type(model.model).forward
    backbone = type(f"Changed{type(model.model).__name__}", (type(model.model),), {})
    backbone.forward = change(original)

    class Model(type(model)):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.__class__ = backbone

    return Model(model.config)


def adds_embeddings_at_the_end(forward: Any) -> Any:
    def changed(
        self: Any, *args: Any, inputs_embeds: Any = None, input_ids: Any = None, **kwargs: Any
    ) -> Any:
        embeds_BSD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        outputs = forward(self, *args, inputs_embeds=embeds_BSD, **kwargs)
        outputs.last_hidden_state = outputs.last_hidden_state + embeds_BSD
        return outputs

    return changed


def scales_between_the_layers(forward: Any) -> Any:
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = self.layers[1].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
        try:
            return forward(self, *args, **kwargs)
        finally:
            handle.remove()

    return changed


@pytest.mark.parametrize("change", [adds_embeddings_at_the_end, scales_between_the_layers])
def test_a_backbone_that_does_more_than_call_its_layers_is_refused(change: Any) -> None:
    model = tamper(random_decoder("Llama"), change)
    with pytest.raises(ConfigError):
        ds_ext.from_transformers(model)


def test_a_model_without_a_language_head_is_refused() -> None:
    sizes = {"vocab_size": WORDS, "d_model": 32, "num_layers": 2, "d_ff": 48, "num_heads": 4}
    encoder_decoder = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    for model in (encoder_decoder, random_decoder("Llama").model, nn.Linear(2, 2)):
        with pytest.raises(ConfigError):
            ds_ext.from_transformers(model)


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ds_ext.from_transformers(tmp_path / "none")
    folder = Path(save_decoder("Llama", tmp_path / "model"))
    layers, _ = ds_ext.from_transformers(folder)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    key = "model.layers.1.self_attn.q_proj.weight"
    weight_map = {name: file for name, file in table["weight_map"].items() if name != key}
    index.write_text(json.dumps(table | {"weight_map": weight_map | {"none": table["weight_map"][key]}}))
    with pytest.raises(ConfigError):
        ds_ext.from_transformers(folder)
    index.write_text(json.dumps(table | {"weight_map": weight_map}))
    layers, _ = ds_ext.from_transformers(folder)
    layers[2].build()
    with pytest.raises(ConfigError):
        layers[3].build()
    index.unlink()
    with pytest.raises(ConfigError):
        ds_ext.from_transformers(folder)


@pytest.mark.parametrize("changes", [{}, {"auto_map": {"AutoConfig": "own.Config"}}])
def test_a_config_that_transformers_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """The error is ours, and no code of the folder runs."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question to the user"))
    folder = Path(save_decoder("Llama", tmp_path / "model"))
    (folder / "own.py").write_text("raise SystemExit(7)")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "own_model"} | changes))
    with pytest.raises(ConfigError, match="own_model.*" + "".join(changes)):
        ds_ext.from_transformers(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        ds_ext.from_transformers(folder)


def test_unsupported_adapters_are_refused() -> None:
    for config in (
        peft.LoraConfig(target_modules=["lm_head"]),
        peft.LoraConfig(target_modules=["none"]),
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"),
        object(),
    ):
        with pytest.raises(ConfigError):
            ds_ext.from_transformers(random_decoder("Llama"), lora=config)
