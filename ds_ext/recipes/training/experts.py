"""Megatron's flags of experts: a job with ``--num-experts`` trains new weights of a model of transformers.

The model is the class of transformers that computes the same: Mixtral, Qwen3-MoE or GLM-4.5.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError, Problems
from ...model.config import TransformerConfig
from ...model.field_flags import Flag, flag_name
from ...model.hf_decoder import common_json

MODEL = "model"  # folder with config.json, in that of --save
_FLAGS_OF_LAYERS = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}
# Values of flags that only a sigmoid has others of.
_WITH_SOFTMAX = {
    **{"moe_shared_expert_intermediate_size": 0, "moe_router_num_groups": 1},
    **{"moe_router_topk_scaling_factor": 1.0, "moe_router_enable_expert_bias": False},
}
EXPERT_FLAGS = (
    Flag("num_experts", int, "E", "experts in place of an MLP; new weights of a model of transformers"),
    Flag("moe_router_topk", int, "K", "experts of a token", 2, least=1),
    Flag("moe_ffn_hidden_size", int, "", "inner width of an expert (--ffn-hidden-size)"),
    Flag(
        *("moe_layer_freq", str, "N", "experts in every N-th layer, from the first on; or a list: [0]+[1]*7"),
        "1",
    ),
    Flag("moe_router_load_balancing_type", str, "", "", "aux_loss", choices=("aux_loss", "none")),
    Flag("moe_aux_loss_coeff", float, "", "factor of the loss of routers, a sum over layers", 0.0),
    Flag("moe_z_loss_coeff", float, "", "factor of the mean square of the routers' logsumexp", 0.0),
    Flag("moe_router_score_function", str, "", "", "softmax", choices=("softmax", "sigmoid")),
    Flag("moe_router_pre_softmax", bool, "", "softmax over all experts, not those of the token"),
    Flag("moe_router_topk_scaling_factor", float, "", "factor of the experts' sum, with sigmoid", 1.0),
    Flag("moe_router_num_groups", int, "", "groups of experts, with sigmoid", 1, least=1),
    Flag("moe_router_group_topk", int, "", "groups from which a token takes its experts", 1, least=1),
    Flag("moe_shared_expert_intermediate_size", int, "", "inner width of shared experts, with sigmoid", 0),
)


def take_experts(args: argparse.Namespace, config: TransformerConfig) -> None:
    """Let the job train new weights of the model that the flags describe.

    Args:
        args: flags with ``num_experts``; changed in place.
        config: sizes of the model, whose layers have an MLP.

    Raises ConfigError for flags that no class of transformers computes, and for another model in ``--save``.
    """
    if args.hf_model:
        raise ConfigError(
            f"--num-experts: {args.hf_model} has its own experts (got {args.num_experts}). Remove one of the flags."
        )
    args.hf_model = str(write_model(args, config))
    args.train_from_scratch, args.transformer_impl = True, "transformers"


def write_model(args: argparse.Namespace, config: TransformerConfig) -> Path:
    """Write ``config.json`` for the flags to ``--save``, or to a temporary folder, and return the folder."""
    values = model_json(args, config)
    if args.save and not args.dry_run:
        folder = Path(args.save, MODEL)
    else:
        folder = Path(tempfile.mkdtemp(prefix="ds_ext_model_"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, text = folder / "config.json", json.dumps(values, indent=2)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            _require_same(path, values)
        part = folder / f".config.{os.getpid()}"  # all ranks of a host write it
        part.write_text(f"{text}\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"--save: cannot write {path} ({error.strerror}). Use another folder.") from None
    return folder


def _require_same(path: Path, values: Mapping[str, Any]) -> None:
    saved = json.loads(path.read_text())
    keys = [key for key in {**saved, **values} if saved.get(key) != values.get(key)]
    if keys:
        got = ", ".join(f"{key} {saved.get(key)}, here {values.get(key)}" for key in keys[:4])
        raise ConfigError(
            f"--save: {path} is another model (got {got}). Set the sizes of that run, or use another folder."
        )


def model_json(args: argparse.Namespace, config: TransformerConfig) -> dict[str, Any]:
    """Return the ``config.json`` of the model."""
    problems = Problems()
    for name, value in _FLAGS_OF_LAYERS.items():
        if getattr(config, name) != value:
            problems.add(f"--num-experts: needs {_text(name, value)} (got {getattr(config, name)}). Add it.")
    if config.add_bias_linear:
        problems.add("--num-experts: experts have no biases (got none of --disable-bias-linear). Add it.")
    if config.hidden_dropout:
        problems.add(f"--hidden-dropout: must be 0 with --num-experts (got {config.hidden_dropout:g}).")
    is_sparse: list[bool] = []
    with problems.collect():
        is_sparse = sparse_layers(args.moe_layer_freq, config.num_layers)
    if args.num_experts < max(2, args.moe_router_topk):
        problems.add(
            f"--num-experts: must be at least 2, and --moe-router-topk {args.moe_router_topk} (got {args.num_experts})."
        )
    kind = _kind(args, config, is_sparse, problems)
    problems.raise_all()
    loss = args.moe_aux_loss_coeff if args.moe_router_load_balancing_type == "aux_loss" else 0.0
    if loss or args.moe_z_loss_coeff:
        kind |= {"output_router_logits": True, "router_aux_loss_coef": loss}
    common = common_json(config, None, "float32")
    return {**common, "num_experts_per_tok": args.moe_router_topk, "use_cache": False, **kind}


def _kind(
    args: argparse.Namespace, config: TransformerConfig, is_sparse: list[bool], problems: Problems
) -> dict[str, Any]:
    """Return the keys of the class that computes what the flags say; add a problem for flags that none computes."""
    experts, width = args.num_experts, args.moe_ffn_hidden_size or config.ffn_size
    dense = [i for i, sparse in enumerate(is_sparse) if not sparse]
    if args.moe_router_score_function == "sigmoid":
        return _glm(args, config, width, dense, problems)
    for name, value in _WITH_SOFTMAX.items():
        if getattr(args, name) != value:
            problems.add(
                f"{flag_name(name)}: needs --moe-router-score-function sigmoid (got {getattr(args, name)})."
            )
    if config.rotary_percent != 1:
        problems.add(
            f"--rotary-percent: must be 1 without --moe-router-score-function sigmoid (got {config.rotary_percent:g})."
        )
    if config.qk_layernorm:
        _refuse_window(config, problems)
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "moe_intermediate_size": width,
            "mlp_only_layers": dense,
            "decoder_sparse_step": 1,
            "norm_topk_prob": not args.moe_router_pre_softmax,
            "attention_bias": config.add_qkv_bias,
        }
    refused = {
        "--moe-router-pre-softmax": args.moe_router_pre_softmax,
        "--moe-layer-freq": bool(dense),
        "--add-qkv-bias": config.add_qkv_bias,
    }
    for flag in (flag for flag, value in refused.items() if value):
        problems.add(f"{flag}: needs --qk-layernorm, as in Qwen3-MoE (got none). Add it, or remove {flag}.")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "intermediate_size": width,
        "sliding_window": config.sliding_window,
    }


def _refuse_window(config: TransformerConfig, problems: Problems) -> None:
    if config.sliding_window is not None:
        problems.add(
            f"--window-size: with --num-experts, only a Mixtral has a window (got {config.sliding_window - 1},0). "
            f"Remove it, or --qk-layernorm and sigmoid scores."
        )


def _glm(
    args: argparse.Namespace, config: TransformerConfig, width: int, dense: list[int], problems: Problems
) -> dict[str, Any]:
    _refuse_window(config, problems)
    rotary = common_json(config, None, "float32")["rope_parameters"]
    shared, loss = args.moe_shared_expert_intermediate_size, args.moe_router_load_balancing_type
    if shared % width:
        problems.add(
            f"--moe-shared-expert-intermediate-size: must be a multiple of --moe-ffn-hidden-size {width} (got "
            f"{shared})."
        )
    if dense != [*range(len(dense))]:
        problems.add(
            f"--moe-layer-freq: layers without experts must be the first ones, as in GLM-4.5 (got {dense})."
        )
    if args.num_experts % args.moe_router_num_groups:
        problems.add(
            f"--moe-router-num-groups: must divide --num-experts {args.num_experts} (got {args.moe_router_num_groups})."
        )
    if args.moe_router_num_groups > 1 and args.moe_router_topk != 2 * args.moe_router_group_topk:
        problems.add(
            f"--moe-router-group-topk: must be half of --moe-router-topk {args.moe_router_topk}, as in DeepSeek-V3 "
            f"(got {args.moe_router_group_topk})."
        )
    if (args.moe_aux_loss_coeff and loss != "none") or args.moe_z_loss_coeff:
        problems.add(
            "--moe-aux-loss-coeff, --moe-z-loss-coeff: must be 0 with --moe-router-score-function sigmoid (got "
            f"{args.moe_aux_loss_coeff:g} and {args.moe_z_loss_coeff:g})."
        )
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "rope_parameters": {**rotary, "partial_rotary_factor": config.rotary_percent},
        "partial_rotary_factor": config.rotary_percent,  # transformers 5.16 replaces the other by this, or by a half
        "model_type": "glm4_moe",
        "n_routed_experts": args.num_experts,
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
        "n_group": args.moe_router_num_groups,
        "topk_group": args.moe_router_group_topk,
        "routed_scaling_factor": args.moe_router_topk_scaling_factor,
        "norm_topk_prob": args.moe_router_topk > 1,
        "first_k_dense_replace": len(dense),
        "use_qk_norm": config.qk_layernorm,
        "attention_bias": config.add_qkv_bias,
    }


def sparse_layers(pattern: str, layers: int) -> list[bool]:
    """Return whether each layer has experts, for ``--moe-layer-freq``: ``2``, or ``[0]+[1]*7``."""
    match = re.fullmatch(r"\s*(\d+)\s*", pattern)
    if match and int(match[1]) > 0:
        return [layer % int(match[1]) == 0 for layer in range(layers)]
    values: list[bool] = []
    for part in re.sub(r"[\s()]", "", pattern).split("+"):
        term = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", part)
        if term is None:
            raise ConfigError(
                f"--moe-layer-freq: must be a number, or a list of 0 and 1 (got {pattern!r}). Use for example "
                f"'[0]+[1]*{layers - 1}'."
            )
        values += [value == "1" for value in term[1].split(",")] * int(term[2] or 1)
    if len(values) != layers or True not in values:
        raise ConfigError(
            f"--moe-layer-freq: must have {layers} elements, one of them 1 (got {len(values)}). Use for example "
            f"'[0]+[1]*{layers - 1}'."
        )
    return values


def _text(name: str, value: Any) -> str:
    return flag_name(name) if value is True else f"{flag_name(name)} {value}"
