"""Megatron's flags for keys of the JSON, its flags that are refused, and its tokenizer types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..models.field_flags import Flag

# --tokenizer-type -> kind of its file: GPT-2's two files, a tokenizer.json, or a sentencepiece model.
TOKENIZER_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "GPT2BPETokenizer": "gpt2",
        "HuggingFaceTokenizer": "json",
        "SentencePieceTokenizer": "model",
        "GPTSentencePieceTokenizer": "model",
        "Llama2Tokenizer": "model",
        "BertWordPieceLowerCase": "json",
        "BertWordPieceCase": "json",
    }
)
TOKENIZER_FILES: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "--vocab-file vocab.json and --merge-file merges.txt",
        "json": "--tokenizer-model tokenizer.json (or BERT's vocab.txt)",
        "model": "--tokenizer-model with a sentencepiece .model file",
    }
)


@dataclass(frozen=True)
class JsonKey:
    """Flag that sets a key of the JSON.

    Args:
        path: the key and the keys of its objects, with dots.
        kind: type of the flag's value; None: the flag is a switch.
        value: value that a switch sets.
        note: addition to the help, which is the path.
        metavar: name of the value in the help; "": that of the flag.
        choices: values of the flag; empty: any.
        computed: :mod:`.section_flags` makes the key's value, of this flag or of several.
    """

    path: str
    kind: type | None = None
    value: Any = True
    note: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    computed: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``add_argument``."""
        value = "" if self.kind or self.value is True else f": {json.dumps(self.value)}"
        return Flag(
            kind=self.kind or bool,
            default=None if self.kind else False,
            choices=self.choices,
            metavar=self.metavar,
            help=f"{self.path}{value}{self.note}",
        ).arguments


@dataclass(frozen=True)
class Refused:
    """Flag of Megatron that the scripts refuse, with its replacement or the reason why it has none."""

    use: str = ""
    reason: str = ""

    def error(self, flag: str) -> str:
        """Return the error for the flag, with its dashes."""
        if self.use:
            return f"{flag}: unknown flag. Use {self.use}."
        return f"{flag}: has no equivalent, because {self.reason}. Remove it."


_CHUNKS = '--schedule interleaved, with "schedule_options": {"chunks": 2} in the "ds_ext" section'
_TRACE = '"trace": {"dir": DIR} in the "ds_ext" section'
_STAGES = "--stage-layers 2,3,3,2 for the layers of every stage"
_LAUNCHER = "the flag of the launcher, deepspeed or torchrun, for the number of ranks"
_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_SAMPLES, _LINEAR = ", in samples", " (linear if another flag of the learning rate is given)"
_TOTAL, _WARMUP = "scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps"
# Flag with underscores -> what becomes of it.
MEGATRON_FLAGS: Mapping[str, JsonKey | Refused] = MappingProxyType(
    {
        "schedule": JsonKey("ds_ext.schedule", str, note=": name, auto, or timetable file"),
        "pipeline_model_parallel_size": JsonKey("ds_ext.pipeline_parallel_size", int, metavar="D"),
        "tensor_model_parallel_size": JsonKey("ds_ext.tensor_parallel_size", int, metavar="T"),
        "sequence_parallel": JsonKey("ds_ext.sequence_parallel"),
        "use_tp_pp_dp_mapping": JsonKey("ds_ext.rank_order", value="tp-pp-dp"),
        "calculate_per_token_loss": JsonKey("ds_ext.loss_weighting", value="tokens", note=", the default"),
        "enable_bitpipe_schedule": JsonKey("ds_ext.schedule", value="bitpipe"),
        "use_dpp": JsonKey("ds_ext.schedule", value="dpp"),
        "forward_backward_disaggregating": JsonKey("ds_ext.schedule", value="fbd"),
        "ignore_forward_tensor_parallel": JsonKey("ds_ext.fbd.merge_forward_tensor_parallel"),
        "node_ips": JsonKey("ds_ext.transport_options.node_ips", str, metavar="IP,IP"),
        "micro_batch_size": JsonKey("train_micro_batch_size_per_gpu", int),
        "global_batch_size": JsonKey("train_batch_size", int),
        "clip_grad": JsonKey("gradient_clipping", float, note=" (DeepSpeed's default: 1.0); 0: off"),
        "lr": JsonKey("optimizer.params.lr", float),
        "weight_decay": JsonKey("optimizer.params.weight_decay", float),
        "adam_beta1": JsonKey("optimizer.params.betas", float, note=", its first element", computed=True),
        "adam_beta2": JsonKey("optimizer.params.betas", float, note=", its second element", computed=True),
        "adam_eps": JsonKey("optimizer.params.eps", float),
        "optimizer": JsonKey(
            "optimizer.type", str, choices=("adam", "sgd"), note=": AdamW or SGD", computed=True
        ),
        "use_distributed_optimizer": JsonKey("zero_optimization.stage", value=1),
        "lr_decay_style": JsonKey(
            "scheduler.params.decay_style", str, choices=_STYLES, note=_LINEAR, computed=True
        ),
        "min_lr": JsonKey("scheduler.params.min_lr", float, computed=True),
        "lr_decay_iters": JsonKey(_TOTAL, int, metavar="STEPS", note=" (--train-iters)", computed=True),
        "lr_decay_samples": JsonKey(_TOTAL, int, metavar="N", note=_SAMPLES, computed=True),
        "lr_warmup_iters": JsonKey(_WARMUP, int, metavar="STEPS", note=" (0)", computed=True),
        "lr_warmup_samples": JsonKey(_WARMUP, int, metavar="N", note=_SAMPLES, computed=True),
        "lr_warmup_fraction": JsonKey(
            _WARMUP, float, metavar="F", note=", as a share of the decay", computed=True
        ),
        "lr_warmup_init": JsonKey("scheduler.params.warmup_init_lr", float, computed=True),
        "bf16": JsonKey("bf16.enabled"),
        "fp16": JsonKey("fp16.enabled"),
        "loss_scale": JsonKey("fp16.loss_scale", float, note="; 0: dynamic"),
        "initial_loss_scale": JsonKey(
            "fp16.initial_scale_power", float, note=", 2 to the power of it", computed=True
        ),
        "min_loss_scale": JsonKey("fp16.min_loss_scale", float),
        "loss_scale_window": JsonKey("fp16.loss_scale_window", int, metavar="STEPS"),
        "hysteresis": JsonKey("fp16.hysteresis", int, metavar="N"),
        "tensorboard_dir": JsonKey(
            "tensorboard.output_path", str, metavar="DIR", note=", and enabled", computed=True
        ),
        "recompute_method": Refused("--recompute-interval K to recompute every K-th layer"),
        "recompute_num_layers": Refused("--recompute-interval K to recompute every K-th layer"),
        "recompute_activations": Refused("--recompute-granularity selective"),
        "checkpoint_activations": Refused("--recompute-granularity full"),
        "checkpoint_num_layers": Refused("--recompute-granularity full"),
        "deepspeed_activation_checkpointing": Refused("--recompute-granularity full"),
        "warmup": Refused("--lr-warmup-fraction"),
        "zero_stage": Refused("--use-distributed-optimizer for ZeRO stage 1"),
        "decoder_first_pipeline_num_layers": Refused(_STAGES),
        "decoder_last_pipeline_num_layers": Refused(_STAGES),
        "pipeline_model_parallel_layout": Refused(_STAGES),
        "batch_size": Refused("--micro-batch-size"),
        "model_parallel_size": Refused("--tensor-model-parallel-size"),
        "train_samples": Refused("--train-iters"),
        "exit_interval": Refused("--train-iters"),
        "exit_duration_in_mins": Refused("--train-iters"),
        "num_layers_per_virtual_pipeline_stage": Refused(_CHUNKS),
        "num_virtual_stages_per_pipeline_rank": Refused(_CHUNKS),
        "train_data_path": Refused("--data-path and --split"),
        "valid_data_path": Refused("--data-path and --split"),
        "test_data_path": Refused("--data-path and --split"),
        "mask_prob": Refused("train_bert.py"),
        "short_seq_prob": Refused("train_bert.py"),
        "bert_no_binary_head": Refused("train_bert.py"),
        "tensorboard_log_interval": Refused("--tensorboard-dir; every step is written"),
        "num_gpus": Refused(_LAUNCHER),
        "nproc_per_node": Refused(_LAUNCHER),
        "trace": Refused(_TRACE),
        "trace_dir": Refused(_TRACE),
        "trace_interval": Refused(_TRACE),
        "trace_granularity": Refused(_TRACE),
        "wandb_exp_name": Refused('the "wandb" section of the JSON'),
        "wandb_project": Refused('the "wandb" section of the JSON'),
        "use_rotary_position_embeddings": Refused("--position-embedding-type rope"),
        "layernorm_epsilon": Refused("--norm-epsilon"),
        "rank_order": Refused('"rank_order" in the "ds_ext" section, or --use-tp-pp-dp-mapping'),
        "log_params_norm": Refused("--metrics-file"),
        "log_throughput": Refused("--metrics-file"),
        "timing_log_level": Refused("--metrics-file"),
        "distributed_timeout_minutes": Refused(
            '"transport_options": {"timeout_s": seconds} in the "ds_ext" section'
        ),
        "workload": Refused(reason="messages are not cut into slices of a fixed size"),
        "use_flash_attn": Refused(
            reason="attention uses the kernels of torch's scaled_dot_product_attention"
        ),
        "use_mcore_models": Refused(reason="there is one implementation of the models"),
        "transformer_pipeline_model_parallel_size": Refused(
            reason="the encoder and the decoder are one pipeline"
        ),
        "no_masked_softmax_fusion": Refused(reason="there are no fused kernels to turn off"),
        "no_gradient_accumulation_fusion": Refused(reason="there are no fused kernels to turn off"),
        "no_bias_gelu_fusion": Refused(reason="there are no fused kernels to turn off"),
        "no_async_tensor_model_parallel_allreduce": Refused(
            reason="tensor-parallel all-reduces are not asynchronous"
        ),
        "deepspeed_mpi": Refused(reason="the launcher sets the ranks"),
        "cpu_optimizer": Refused(reason="the optimizer runs where the weights are"),
        "distributed_backend": Refused(reason="nccl is used on GPUs and gloo elsewhere"),
        "no_load_optim": Refused(reason="a checkpoint is loaded as a whole"),
        "no_load_rng": Refused(reason="random numbers depend on the seed and the step only"),
        "no_save_optim": Refused(reason="a checkpoint is saved as a whole"),
        "no_save_rng": Refused(reason="random numbers depend on the seed and the step only"),
        "num_workers": Refused(reason="samples are read from memory-mapped files, without worker processes"),
        "data_impl": Refused(reason="data are in Megatron's indexed format"),
        "dataloader_type": Refused(reason="samples are shuffled once per epoch, as with single"),
        "ckpt_format": Refused(reason="checkpoints have one format"),
    }
)
JSON_KEYS = {flag: row for flag, row in MEGATRON_FLAGS.items() if isinstance(row, JsonKey)}


def refusal(flag: str) -> str | None:
    """Return an error with the replacement of Megatron's ``flag`` (with its dashes); None for other flags."""
    row = MEGATRON_FLAGS.get(flag.removeprefix("--").replace("-", "_"))
    return row.error(flag) if isinstance(row, Refused) else None
