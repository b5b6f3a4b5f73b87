"""Megatron's flags of experts: the model of transformers that computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ext.errors import ConfigError
from ds_ext.hf.weights import make_source
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.recipes.training.arguments import parse
from ds_ext.recipes.training.experts import model_json, sparse_layers, take_experts
from ds_ext.recipes.training.setup import model_fields

transformers: Any = pytest.importorskip("transformers")
LAYERS, HIDDEN, EXPERTS = 4, 32, 8
SIZES = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length 16 --ffn-hidden-size 48 "
    "--max-position-embeddings 64 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --lr 1e-3 "
    "--global-batch-size 4 --init-method-std 0.3"
).split()
LLAMA = [
    "--swiglu",
    "--normalization",
    "RMSNorm",
    "--position-embedding-type",
    "rope",
    "--disable-bias-linear",
]
UNTIED = "--untie-embeddings-and-output-weights"
SIGMOID = "--moe-router-score-function sigmoid"
GROUPS = f"{SIGMOID} --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4"


def flags_of(text: str, *others: str, sizes: list[str] | None = None) -> tuple[Any, GPTConfig]:
    words = [
        *SIZES,
        *(LLAMA if sizes is None else sizes),
        "--num-experts",
        str(EXPERTS),
        *text.split(),
        *others,
    ]
    args, _ = parse("train_gpt.py", words)
    return args, GPTConfig(**{**model_fields(args, None), "vocab_size": 300})


def config_of(text: str) -> Any:
    args, config = flags_of(text)
    values = model_json(args, config)
    return transformers.AutoConfig.for_model(**values)


def weights_by_rule(logits_NE: Tensor, args: Any) -> Tensor:
    """Return the weight of every expert for every token, by Megatron's rules; 0 for those that are not chosen."""
    chosen, groups = args.moe_router_topk, args.moe_router_num_groups
    result_NE = torch.zeros_like(logits_NE)
    for token, logits_E in enumerate(logits_NE.detach()):
        weights_E = result_NE[token]
        scores_E = logits_E.sigmoid() if args.moe_router_score_function == "sigmoid" else logits_E
        allowed_E = torch.zeros_like(logits_E, dtype=torch.bool)
        of_group = scores_E.view(groups, -1).topk(chosen // args.moe_router_group_topk, dim=1).values.sum(1)
        allowed_E.view(groups, -1)[of_group.topk(args.moe_router_group_topk).indices] = True
        top = scores_E.masked_fill(~allowed_E, -torch.inf).topk(chosen).indices
        if args.moe_router_score_function == "sigmoid":
            weights_E[top] = scores_E[top] / (scores_E[top].sum() if chosen > 1 else 1)
        elif args.moe_router_pre_softmax:
            weights_E[top] = logits_E.softmax(0)[top]
        else:
            weights_E[top] = logits_E[top].softmax(0)
    return result_NE * args.moe_router_topk_scaling_factor


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "mixtral"),
        ("--moe-router-topk 1", "mixtral"),
        ("--moe-router-topk 3 --qk-layernorm", "qwen3_moe"),
        ("--qk-layernorm --moe-router-pre-softmax", "qwen3_moe"),
        (SIGMOID, "glm4_moe"),
        (f"{SIGMOID} --moe-router-topk 1", "glm4_moe"),
        (f"{GROUPS} --moe-router-topk-scaling-factor 2.5", "glm4_moe"),
        (f"{SIGMOID} --moe-shared-expert-intermediate-size 80 --moe-ffn-hidden-size 40", "glm4_moe"),
    ],
)
def test_the_class_computes_what_the_flags_say(text: str, kind: str) -> None:
    args, _ = flags_of(text)
    config = config_of(text)
    assert config.model_type == kind
    width = args.moe_ffn_hidden_size or 48
    block: Any = make_source(config, None, 1).submodule("model.layers.1").get_submodule("mlp")
    assert block.experts.gate_up_proj.shape == (EXPERTS, 2 * width, HIDDEN)
    x_ND = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(0))
    weights_NE = weights_by_rule(x_ND @ block.gate.weight.T, args)
    expected_ND = torch.zeros_like(x_ND)
    for expert in range(EXPERTS):
        gate_NI, up_NI = (x_ND @ block.experts.gate_up_proj[expert].T).chunk(2, -1)
        y_ND = F.silu(gate_NI) * up_NI @ block.experts.down_proj[expert].T
        expected_ND = expected_ND + weights_NE[:, expert, None] * y_ND
    if shared := args.moe_shared_expert_intermediate_size:
        mlp = block.shared_experts
        assert mlp.gate_proj.weight.shape == (shared, HIDDEN)
        expected_ND = expected_ND + mlp.down_proj(F.silu(mlp.gate_proj(x_ND)) * mlp.up_proj(x_ND))
    output = block(x_ND[None])
    actual_ND = (output[0] if isinstance(output, tuple) else output)[0]
    torch.testing.assert_close(actual_ND, expected_ND, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--num-query-groups 2 --group-query-attention", {"num_key_value_heads": 2}),
        ("--kv-channels 12", {"head_dim": 12}),
        ("--rotary-base 500000", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        ("--norm-epsilon 1e-6 --init-method-std 0.01", {"rms_norm_eps": 1e-6, "initializer_range": 0.01}),
        ("", {"tie_word_embeddings": True, "vocab_size": 300, "output_router_logits": False}),
        (UNTIED, {"tie_word_embeddings": False}),
        ("--window-size 7,0", {"sliding_window": 8}),
        ("--moe-aux-loss-coeff 0.01", {"output_router_logits": True, "router_aux_loss_coef": 0.01}),
        ("--moe-z-loss-coeff 0.01", {"output_router_logits": True, "router_aux_loss_coef": 0.0}),
        (
            "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none",
            {"output_router_logits": False},
        ),
        ("--moe-layer-freq 2 --qk-layernorm", {"mlp_only_layers": [1, 3], "num_experts": EXPERTS}),
        (f"--moe-layer-freq [0]*2+[1,1] {SIGMOID}", {"first_k_dense_replace": 2}),
    ],
)
def test_sizes(text: str, expected: dict[str, Any]) -> None:
    config = config_of(text)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("--moe-router-pre-softmax", "moe-router-pre-softmax"),
        ("--moe-layer-freq 2", "moe-layer-freq"),
        ("--moe-shared-expert-intermediate-size 48", "moe-shared-expert-intermediate-size"),
        ("--moe-router-num-groups 2", "moe-router-num-groups"),
        ("--moe-router-topk-scaling-factor 2", "moe-router-topk-scaling-factor"),
        ("--moe-router-enable-expert-bias", "moe-router-enable-expert-bias"),
        (f"--moe-layer-freq 2 {SIGMOID}", "moe-layer-freq"),
        (f"--moe-shared-expert-intermediate-size 50 {SIGMOID}", "moe-shared-expert-intermediate-size"),
        (f"--moe-aux-loss-coeff 0.1 {SIGMOID}", "moe-aux-loss-coeff"),
        (f"--moe-router-num-groups 3 {SIGMOID}", "moe-router-num-groups"),
        (f"{GROUPS} --moe-router-group-topk 4", "moe-router-group-topk"),
        ("--moe-router-topk 9", "num-experts"),
        ("--moe-layer-freq [1]*3", "moe-layer-freq"),
        ("--moe-layer-freq ([0]+[2])*2", "moe-layer-freq"),
        ("--hidden-dropout 0.1", "hidden-dropout"),
        ("--rotary-percent 0.5", "rotary-percent"),
        ("--rotary-percent 0.5 --qk-layernorm", "rotary-percent"),
        ("--window-size 7,0 --qk-layernorm", "window-size"),
        (f"--window-size 7,0 {SIGMOID}", "window-size"),
    ],
)
def test_what_no_class_computes_is_refused(text: str, key: str) -> None:
    args, config = flags_of(text)
    with pytest.raises(ConfigError, match=f"^--{key}"):
        model_json(args, config)


@pytest.mark.parametrize(
    ("kind", "rotary", "share"),
    [
        *(
            (kind, rotary, 1.0)
            for kind in ("", "--qk-layernorm", SIGMOID)
            for rotary in ("", "--use-rope-scaling")
        ),
        (SIGMOID, "--rotary-percent 0.5", 0.5),
    ],
)
def test_rotary_embeddings(kind: str, rotary: str, share: float) -> None:
    model = make_source(config_of(f"{kind} {rotary}"), None, 1).reference()
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.numel() == HIDDEN // 4 * share / 2
    plain = 10000.0 ** -(torch.arange(frequencies.numel()) / frequencies.numel())
    assert torch.allclose(frequencies, plain) == (rotary != "--use-rope-scaling")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("", 0.0),
        ("--moe-router-bias-update-rate 0.5", 0.0),
        ("--moe-router-enable-expert-bias", 0.001),
        ("--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.5", 0.5),
    ],
)
def test_rate_of_the_biases(text: str, rate: float) -> None:
    words = [*SIZES, *LLAMA, "--num-experts", str(EXPERTS), *SIGMOID.split(), *text.split()]
    assert parse("train_gpt.py", words)[1].ds_ext.router_bias_update_rate == rate


def test_all_flags_that_are_missing_are_named() -> None:
    args, config = flags_of("", sizes=[])
    with pytest.raises(ConfigError) as raised:
        model_json(args, config)
    for flag in (
        "--swiglu",
        "--normalization RMSNorm",
        "--position-embedding-type rope",
        "--disable-bias-linear",
    ):
        assert flag in str(raised.value)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("1", [1, 1, 1, 1]), ("2", [1, 0, 1, 0]), ("[0]+[1]*3", [0, 1, 1, 1]), ("([0, 1]*2)", [0, 1, 0, 1])],
)
def test_layers_with_experts(pattern: str, expected: list[int]) -> None:
    assert sparse_layers(pattern, LAYERS) == expected


def test_a_folder_of_save_keeps_its_model(tmp_path: Path) -> None:
    args, config = flags_of("", "--save", str(tmp_path))
    take_experts(args, config)
    path = tmp_path / "model" / "config.json"
    assert args.hf_model == str(path.parent) and args.transformer_impl == "transformers"
    assert json.loads(path.read_text())["num_local_experts"] == EXPERTS
    again, config = flags_of("", "--save", str(tmp_path))
    take_experts(again, config)
    other, config = flags_of("--moe-router-topk 1", "--save", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^--save: .*num_experts_per_tok 2, here 1"):
        take_experts(other, config)


def test_a_dry_run_writes_no_folder_of_save(tmp_path: Path) -> None:
    args, config = flags_of("", "--save", str(tmp_path / "new"), "--dry-run")
    take_experts(args, config)
    assert not (tmp_path / "new").exists() and Path(args.hf_model, "config.json").is_file()


def test_a_model_of_a_folder_has_its_own_experts(tmp_path: Path) -> None:
    args, config = flags_of("")
    args.hf_model = str(tmp_path)
    with pytest.raises(ConfigError, match=r"^--num-experts: .*got 8"):
        take_experts(args, config)
