"""All flags of Megatron-LM and Megatron-DeepSpeed: translated, harmless or refused; and its tokenizer types."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ...config.deepspeed_json import value_at
from ...errors import ANSWERS, ConfigError
from ...model.field_flags import Flag
from .experts import EXPERT_FLAGS

GPT2_FILES = "--vocab-file vocab.json and --merge-file merges.txt"
JSON_FILE = "--tokenizer-model tokenizer.json (or BERT's vocab.txt)"
MODEL_FILE = "--tokenizer-model with a sentencepiece .model file"
# --tokenizer-type -> flags of its files.
TOKENIZER_TYPES: Mapping[str, str] = {
    "GPT2BPETokenizer": GPT2_FILES,
    "HuggingFaceTokenizer": JSON_FILE,
    "SentencePieceTokenizer": MODEL_FILE,
    "GPTSentencePieceTokenizer": MODEL_FILE,
    "Llama2Tokenizer": MODEL_FILE,
    "BertWordPieceLowerCase": JSON_FILE,
    "BertWordPieceCase": JSON_FILE,
}


@dataclass(frozen=True)
class JsonKey:
    """Flag that sets a key of the JSON.

    Args:
        path: the key and the keys of its objects, with dots.
        kind: type of the flag's value, bool for a switch.
        metavar, choices: as in :class:`.Flag`.
        value: value that a switch sets.
        note: addition to the help, which is the path.
        read: returns the key's value for that of the flag, None to leave it unset, or raises ConfigError.
        also: other keys that the flag sets -> their values.
        computed: :mod:`.section_flags` computes the key's value, from this flag or several.
    """

    path: str
    kind: type = bool
    metavar: str = ""
    note: str = ""
    value: Any = True
    choices: tuple[Any, ...] = ()
    read: Callable[[Any], Any] | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    computed: bool = False

    def flag(self, key: str) -> Flag:
        value = "" if self.value is True else f": {json.dumps(self.value)}"
        return Flag(key, self.kind, self.metavar, f"{self.path}{value}{self.note}", choices=self.choices)

    def keys(self, value: Any) -> dict[str, Any]:
        """Return key of the JSON -> value; empty without the flag. Raises ConfigError."""
        if value is True:
            value = self.value
        elif self.read is not None and value is not None:
            value = self.read(value)
        return {} if value is None or value is False else {self.path: value, **self.also}


@dataclass(frozen=True)
class TrainKeys:
    """Flag that sets keys of "train", which have flags with other names.

    Args:
        keys: key -> value; ``...`` is the value of the flag.
        kind: type of the flag's value, bool for a switch.
    """

    keys: Mapping[str, Any]
    kind: type = bool

    def flag(self, key: str) -> Flag:
        text = ", ".join(k if v is ... else f"{k}: {json.dumps(v)}" for k, v in self.keys.items())
        return Flag(key, self.kind, "N", text)

    def values(self, value: Any) -> dict[str, Any]:
        return {key: value if key_value is ... else key_value for key, key_value in self.keys.items()}


@dataclass(frozen=True)
class Harmless:
    """Flag that the scripts accept and ignore: without it, weights, losses and saved files are the same here.

    Args:
        nargs: number of the flag's values, as in ``add_argument``.
        values: values that are harmless; others are refused; empty: all.
        use: replacement for other values.
        needs: key of the JSON -> values of the key with which the flag is harmless; None: a missing key.
    """

    nargs: int | str
    values: tuple[str, ...] = ()
    use: str = ""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def flag(self, key: str) -> Flag:
        nargs = self.nargs if isinstance(self.nargs, str) else None
        return Flag(key, str if self.nargs else bool, nargs=nargs)

    def errors(self, flag: str, words: Sequence[str], job: Mapping[str, Any]) -> Iterator[str]:
        """Yield errors if the flag is not harmless for a job: its JSON with the values of "train"."""
        if self.values and not {*words} <= {*self.values}:
            fix = f" Use {self.use}." if self.use else ""
            yield f"{flag}: must be {' or '.join(self.values)}, the only behavior (got {' '.join(words)}).{fix}"
        for path, values in self.needs.items():
            if (value := value_at(job, path)) not in values:
                allowed = " or ".join(json.dumps(value) for value in values if value is not None)
                yield f"{flag}: needs {path} {allowed} (got {value!r})."


@dataclass(frozen=True)
class Refused:
    """Flag of Megatron that the scripts refuse.

    ``use`` is its replacement. Without one, ``reason`` has the reason and the remedy.
    """

    use: str = ""
    reason: str = ""

    def error(self, flag: str) -> str:
        if self.use:
            return f"{flag}: unknown flag. Use {self.use}."
        return f"{flag}: not supported, because {self.reason}."


Row = JsonKey | TrainKeys | Harmless | Refused


def _power_of_two(scale: float) -> int:
    power = math.log2(scale) if scale > 0 else math.nan
    if not power.is_integer():
        raise ConfigError(
            f"--initial-loss-scale: must be a power of 2 (got {scale:g}). Use for example 65536."
        )
    return int(power)


def _rows(row: Row, keys: str) -> dict[str, Row]:
    return dict.fromkeys(keys.split(), row)


_TRACE = '"trace": {"dir": DIR} in the "ds_ext" section'
_STAGES = "--stage-layers 2,3,3,2 for the layers of every stage"
_LAUNCHER = "the flag of the launcher, deepspeed or torchrun, for the number of ranks"
_OTHER = "A job without it trains another model"
_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_CHUNKS = "ds_ext.schedule_options.chunks"
_BIAS_RATE = "ds_ext.router_bias_update_rate"
_TOTAL, _WARMUP = "scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps"
# Reason for flags without a replacement, and the remedy -> their keys.
_REFUSED: Mapping[str, str] = {
    "messages are not cut into slices of a fixed size. Remove it": "workload",
    "the encoder and the decoder are one pipeline. Remove it": "transformer_pipeline_model_parallel_size",
    "it depends on torch's kernels. Use torch's settings": "deterministic_mode",
    f"no layer of experts has this option ({ANSWERS}). {_OTHER}": (
        "*moe* *expert* topk mlp_type use_tutel ep_overlap_* use_grouped_gemm_for_dense_mlp "
        "use_fused_weighted_squared_relu"
    ),
    f"the models have no such part. {_OTHER}": (
        "apply_layernorm_1p apply_residual_connection_post_layernorm openai_gelu squared_relu quick_geglu onnx_safe "
        "activation_func_clamp_value attention_output_gate glu_linear_offset softmax_type decoder_* qk_clip* "
        "qk_l2_norm init_method_xavier_uniform embedding_init_method_std data_parallel_random_init no_initialization "
        "multi_latent_attention *_lora_rank *_head_dim *mla_* mscale* *yarn_* mrope_* rope_type no_rope_freq "
        "rotary_interleaved rotary_seq_len_interpolation_factor relative_attention_* window_attn_skip_freq mtp_* "
        "*mamba_* is_hybrid_model hybrid_*_pattern heterogeneous_* experimental_* enable_experimental linear_* gdp_* "
        "*dsa_* *mhc_* use_mup mup_* spec yaml_cfg retro_* scattered_embeddings split_transformers "
        "memory_centric_tiled_linear freeze_all_layers random_ltd pipeline_model_parallel_split_rank "
        "tensor_parallel_num_weight_shards"
    ),
    "the precisions are fp32, bf16 and fp16. A job without it rounds differently": (
        "*fp8* *fp4* fp16_lm_cross_entropy fp32_residual_connection embedding_weights_in_fp32 ddp_reduce_scatter_* "
        "ddp_param_name_* gtp_* disable_bf16_* batch_invariant_* first_last_layers_bf16 num_layers_at_* "
        "use_precision_aware_optimizer output_logit_dtype te_precision_config_file *kitchen* symmetric_ar_type"
    ),
    "all weights have one learning rate. A job without it trains differently": "decoupled_*",
    "the optimizers are AdamW, SGD and those of a JSON. A job without it trains differently": (
        "muon_* lion_* start_weight_decay end_weight_decay apply_wd_* no_weight_decay_cond_type lr_wsd_* "
        "dump_param_to_param_group_map"
    ),
    "data come from --data-path, for example those of `python -m ds_ext prepare`": "mock_data",
    "the data loader has no such option. A job without it trains on other samples": (
        "sft* fim_* *_idx_path train_desc_path train_data_exact_num_epochs aml_data_download_path "
        "data_efficiency_curriculum_learning repeated_dataloader return_data_index use_dataset_only full_validation "
        "multiple_validation_sets validation_set_names start_eval_at_iter eval_*_batch_size skip_train "
        "iterations_to_skip phase_transition_iterations object_storage_cache_path enable_msc "
        "per_dataset_sequences_path tokenizer_hf_* tokenizer_metadata tokenizer_special_tokens "
        "*tokenizer_sentencepiece_* tiktoken_* null_tokenizer_* use_gigatoken chat_template "
        "allow_ambiguous_pad_tokens max_seqlen_per_dp_cp_rank"
    ),
    "all steps of a run have the same batch size. Start a job for each size, with --load": (
        "rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed"
    ),
    "a resumed run has the schedule of its flags or JSON, at the step of the checkpoint. Remove it": (
        "use_checkpoint_opt_param_scheduler no_load_lr_state"
    ),
    "a checkpoint is loaded as a whole. Initial weights come from --hf-model": (
        "no_load_optim finetune pretrained_checkpoint load_main_params_from_ckpt reset_iteration load_tag ckpt_step "
        "override_ckpt_iteration use_checkpoint_args use_mp_args_from_checkpoint_args universal_checkpoint "
        "ckpt_convert_*"
    ),
    "a checkpoint is saved as a whole, at --save-interval. Remove it": (
        "no_save_optim save_*s_interval save_retain_interval non_persistent_* replication*"
    ),
    "a run ends at --train-iters. Set it to the last step of the run, and --lr-decay-iters to that of all runs": (
        "kill_switch_file adlr_*"
    ),
    "training, validation and test samples are shares of the same data. Use --data-path and --split": (
        "train_data_path valid_data_path test_data_path per_split_data_args_path"
    ),
    'failed ranks are restarted by the launcher. See "recovery" in the "ds_ext" section': (
        "inprocess_* enable_ft_package ft_* calc_ft_timeouts"
    ),
    "there is no context parallelism. Use --tensor-model-parallel-size with --sequence-parallel": (
        "ds_sequence_parallel_* force_ds_sequence_parallel hierarchical_context_* hybrid_context_parallel"
    ),
    "nothing is offloaded to the CPU. Use --recompute-granularity and --use-distributed-optimizer": (
        "cpu_* fine_grained_* optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_* use_pin_memory "
        "use_torch_optimizer_for_* *offload_* min_offloaded_tensor_size"
    ),
    "weights and gradients are not sharded over replicas. Use --use-distributed-optimizer": (
        "*fsdp* *_sharding_strategy suggested_communication_unit_size enable_full_sharding_in_hsdp"
    ),
    "the scripts pretrain GPTs and BERTs only. Use Megatron for other tasks": (
        "*inference* rl_* no_rl_* grpo_* langrl_* refit_method perform_rl_step dino_* vision_* swin_* img_* patch_dim "
        "num_channels num_classes mask_factor mask_type classes_fraction *_per_class_fraction iter_per_epoch "
        "biencoder_* retriever_* indexer_* ict_* bert_load bert_embedder_type block_data_path embedding_path "
        "evidence_data_path titles_data_path query_in_block_prob use_one_sent_docs sample_rate output_bert_embeddings "
        "kd kd_* mos *_teacher logits_* max_tokens_to_oom num_speculative_tokens flash_decode enable_chunked_prefill "
        "*_for_prefill mlp_chunks_for_* decode_only_cuda_graphs use_legacy_static_engine use_same_sampling_*"
    ),
    "it is for tests of Megatron. Remove it": (
        "check_for_* lazy_mpu_init error_injection_* fault_injector_* result_rejected_* test_mode fake_process_group"
    ),
}
# Flag with underscores, or a pattern of flags -> what becomes of it; None: it is a flag of train_gpt.py.
MEGATRON_FLAGS: Mapping[str, Row | None] = {
    **dict.fromkeys(flag.key for flag in EXPERT_FLAGS),
    "schedule": JsonKey("ds_ext.schedule", str, note=": name, auto, or timetable file"),
    "pipeline_model_parallel_size": JsonKey("ds_ext.pipeline_parallel_size", int, "D"),
    "tensor_model_parallel_size": JsonKey("ds_ext.tensor_parallel_size", int, "T"),
    "num_layers_per_virtual_pipeline_stage": JsonKey(
        _CHUNKS, int, "K", ": layers / (D x K), of interleaved", computed=True
    ),
    "num_virtual_stages_per_pipeline_rank": JsonKey(_CHUNKS, int, "V", ", of interleaved", computed=True),
    "expert_model_parallel_size": JsonKey(
        *("expert_parallel.autoep_size", int, "EP"),
        read=lambda size: None if size == 1 else size,
        also={"expert_parallel.enabled": True},
    ),
    "moe_router_enable_expert_bias": JsonKey(_BIAS_RATE, computed=True),
    "moe_router_bias_update_rate": JsonKey(_BIAS_RATE, float, "R", " (1e-3)", computed=True),
    "sequence_parallel": JsonKey("ds_ext.sequence_parallel"),
    "sequence_slices": JsonKey("ds_ext.sequence_slices", int, "K"),
    "vocabulary_parallel_head": JsonKey("ds_ext.vocabulary_parallel_head"),
    "use_tp_pp_dp_mapping": JsonKey("ds_ext.rank_order", value="tp-pp-dp"),
    "calculate_per_token_loss": JsonKey("ds_ext.loss_weighting", value="tokens", note=", the default"),
    "enable_bitpipe_schedule": JsonKey("ds_ext.schedule", value="bitpipe"),
    "use_dpp": JsonKey("ds_ext.schedule", value="dpp"),
    "enable_zbh1_pipeline": JsonKey("ds_ext.schedule", value="zb_h1"),
    "forward_backward_disaggregating": JsonKey("ds_ext.schedule", value="fbd"),
    "ignore_forward_tensor_parallel": JsonKey("ds_ext.fbd.merge_forward_tensor_parallel"),
    "node_ips": JsonKey("ds_ext.transport_options.node_ips", str, "IP,IP"),
    "micro_batch_size": JsonKey("train_micro_batch_size_per_gpu", int),
    "global_batch_size": JsonKey("train_batch_size", int),
    "clip_grad": JsonKey("gradient_clipping", float, note=" (DeepSpeed's default: 1.0); 0: off"),
    "lr": JsonKey("optimizer.params.lr", float),
    "weight_decay": JsonKey("optimizer.params.weight_decay", float),
    "adam_beta1": JsonKey("optimizer.params.betas", float, note=", its first element", computed=True),
    "adam_beta2": JsonKey("optimizer.params.betas", float, note=", its second element", computed=True),
    "adam_eps": JsonKey("optimizer.params.eps", float),
    "optimizer": JsonKey("optimizer.type", str, "", ": AdamW or SGD", choices=("adam", "sgd"), computed=True),
    "use_distributed_optimizer": JsonKey("zero_optimization.stage", value=1),
    "lr_decay_style": JsonKey(
        "scheduler.params.decay_style", str, "", " (linear)", choices=_STYLES, computed=True
    ),
    "min_lr": JsonKey("scheduler.params.min_lr", float, computed=True),
    "lr_decay_iters": JsonKey(_TOTAL, int, "STEPS", " (--train-iters)", computed=True),
    "lr_decay_samples": JsonKey(_TOTAL, int, "N", ", in samples", computed=True),
    "lr_warmup_iters": JsonKey(_WARMUP, int, "STEPS", " (0)", computed=True),
    "lr_warmup_samples": JsonKey(_WARMUP, int, "N", ", in samples", computed=True),
    "lr_warmup_fraction": JsonKey(_WARMUP, float, "F", ", as a share of the decay", computed=True),
    "lr_warmup_init": JsonKey("scheduler.params.warmup_init_lr", float, computed=True),
    "bf16": JsonKey("bf16.enabled"),
    "grad_reduce_in_bf16": JsonKey("communication_data_type", value="bf16", computed=True),
    "fp16": JsonKey("fp16.enabled"),
    "loss_scale": JsonKey("fp16.loss_scale", float, note="; 0: dynamic"),
    "initial_loss_scale": JsonKey(
        "fp16.initial_scale_power", float, note=", 2 to the power of it", read=_power_of_two
    ),
    "min_loss_scale": JsonKey("fp16.min_loss_scale", float),
    "loss_scale_window": JsonKey("fp16.loss_scale_window", int, "STEPS"),
    "hysteresis": JsonKey("fp16.hysteresis", int, "N"),
    "tensorboard_dir": JsonKey(
        *("tensorboard.output_path", str, "DIR", ", and enabled"),
        also={"tensorboard.enabled": True, "tensorboard.job_name": ""},
    ),
    "wandb_project": JsonKey(  # as in Megatron, "" is off
        *("wandb.project", str, "", ", and enabled"),
        read=lambda name: name or None,
        also={"wandb.enabled": True},
    ),
    "wandb_entity": JsonKey("wandb.team", str),
    "zero_stage": JsonKey("zero_optimization.stage", int, choices=(0, 1)),
    "sgd_momentum": JsonKey("optimizer.params.momentum", float, note=" of sgd (0.9)", computed=True),
    "distributed_timeout_minutes": JsonKey(
        *("ds_ext.transport_options.timeout_s", float, "", ", times 60"),
        read=lambda minutes: 60 * minutes,
    ),
    "checkpoint_activations": TrainKeys({"recompute_granularity": "full"}),
    "recompute_activations": TrainKeys({"recompute_granularity": "selective"}),
    "use_rotary_position_embeddings": TrainKeys({"position_embedding_type": "rope"}),
    "rotary_position_embeddings_theta": TrainKeys({"rotary_base": ...}, float),
    "layernorm_epsilon": TrainKeys({"norm_epsilon": ...}, float),
    "num_key_value_heads": TrainKeys({"num_query_groups": ..., "group_query_attention": True}, int),
    "encoder_num_layers": TrainKeys({"num_layers": ...}, int),
    "encoder_seq_length": TrainKeys({"seq_length": ...}, int),
    "persistent_save_interval": TrainKeys({"save_interval": ...}, int),
    **_rows(TrainKeys({"make_vocab_size_divisible_by": 1}), "no_pad_vocab_size disable_pad_vocab_size"),
    # Harmless switches: kernels, overlap, communication, files and logs.
    **_rows(
        Harmless(0),
        "*_query_key_layer_scaling attention_softmax_in_fp32 use_flash_attn* no_*_fusion *_to_tensorboard *_tp_comm_* "
        "tp_comm_overlap tp_comm_overlap_rs_dgrad cross_entropy_loss_fusion no_persist_layer_norm "
        "disable_mem_efficient_ln disable_jit_fuser fused_residual_rmsnorm use_mcore_models use_te_activation_func "
        "use_transformer_engine_op_fuser te_rng_tracker ds_fused_adam optimizer_cuda_graph enable_cuda_graph "
        "external_cuda_graph use_cpu_initialization init_model_with_meta_device overlap_grad_reduce "
        "*overlap_p2p_communication* overlap_param_gather* no_align_* disable_align_grad_reduce "
        "no_async_tensor_model_parallel_allreduce no_contiguous_buffers_in_local_ddp "
        "no_scatter_gather_tensors_in_pipeline no_use_layer_wise_param_layout *_clone_scatter_output_in_embedding "
        "ddp_average_in_collective ddp_pad_buckets_for_high_nccl_busbw defer_embedding_wgrad_compute "
        "delay_wgrad_compute use_ring_exchange_p2p use_nccl_ub use_sharp create_all_gather_group "
        "high_priority_a2a_comm_stream disable_symmetric_registration disable_gloo_process_groups no_pin_cpu_* "
        "deepspeed_activation_checkpointing distribute_*_activations partition_activations checkpoint_in_cpu "
        "contigious_checkpointing synchronize_each_layer zero_contigious_gradients zero_reduce_scatter "
        "no_create_attention_mask_in_dataloader no_data_sharding no_mmap_bin_files mmap_warmup disable_msc "
        "dataloader_defer_npy_index_mmap dataloader_fast_cache_load trust_remote_code exit_signal_handler_for_* "
        "async_ckpt_use_cpu_shm use_persistent_ckpt_worker use_dist_ckpt auto_detect_ckpt_format "
        "*ckpt_fully_parallel_save ckpt_fully_parallel_load ckpt_fully_parallel_load_per_rank_objects "
        "ckpt_assume_constant_structure ckpt_drop_redundant_extra_state ckpt_pg_tensors_cache_create "
        "*_ckpt_load_validate_sharding_integrity dist_ckpt_optim_fully_reshardable dist_ckpt_save_pre_mcore_014 "
        "distrib_optim_fully_reshardable_mem_efficient verify_integrity no_save_rng no_load_rng "
        "*_save_tokenizer_assets *_use_tokenizer_model_from_checkpoint_args override_opt_param_scheduler manual_gc "
        "*_manual_gc_eval no_check_for_nan_in_loss_and_grad no_barrier_with_level_1_timing log_device_memory_used "
        "log_energy log_max_attention_logit log_num_zeros_in_grad log_params_norm log_progress log_straggler "
        "log_throughput disable_straggler_on_startup no_one_logger one_logger_async otel_enabled "
        "run_workload_inspector_server record_memory_history record_shapes nvtx_ranges use_pytorch_profiler "
        "profile_backward pytorch_profiler_collect_* *_flight_recorder_* flight_recorder_include_stack_trace",
    ),
    **_rows(
        Harmless(1),
        "attention_backend flash_attention_version cross_entropy_fusion_impl tp_comm_bootstrap_backend "
        "tp_comm_overlap_cfg cuda_graph_impl cuda_graph_warmup_steps ddp_bucket_size ddp_num_buckets "
        "wgrad_deferral_limit zero_allgather_bucket_size zero_reduce_bucket_size pipeline_model_parallel_comm_backend "
        "microbatch_group_size_per_virtual_pipeline_stage sharp_enabled_group nccl_communicator_config_path "
        "distributed_timeout_seconds_after_init data_cache_path num_workers num_dataset_builder_threads "
        "mid_level_dataset_surplus async_ckpt_*_priority async_strategy ckpt_format dist_ckpt_format "
        "dist_ckpt_strictness dist_ckpt_workers ckpt_fully_parallel_* ckpt_pg_tensors_cache_path "
        "check_weight_hash_across_dp_* manual_gc_interval empty_unused_memory_level gpu_sniff_test_interval "
        "train_sync_interval rerun_mode log_memory_interval logging_level timing_log_* tensorboard_log_interval "
        "tensorboard_queue_size straggler_* one_logger_project one_logger_run_name app_tag_run_* otel_service_name "
        "otel_span_groups wandb_save_dir config_logger_dir memory_snapshot_path flight_recorder_dump_path "
        "flight_recorder_trace_buffer_size profile_step_* profile_steps",
    ),
    **_rows(
        Harmless("+"),
        "cuda_graph_modules cuda_graph_scope cp_comm_type high_priority_stream_groups profile_ranks",
    ),
    "profile": Harmless("?"),
    "enable_zbh1_exact_semantics": Harmless(0),
    "accumulate_allreduce_grads_in_fp32": Harmless(
        0, needs={"fp16.enabled": (None, False), "data_types.grad_accum_dtype": (None, "fp32")}
    ),
    "no_pipeline_parallel": Harmless(0, needs={"ds_ext.pipeline_parallel_size": (None, 1)}),
    "no_position_embedding": Harmless(0, needs={"ds_ext.train.position_embedding_type": ("rope",)}),
    "data_impl": Harmless(1, ("mmap", "infer")),
    "dataloader_type": Harmless(1, ("single",)),
    "distributed_backend": Harmless(1, ("nccl", "gloo")),
    "DDP_impl": Harmless(1, ("local", "torch")),
    "recompute_method": Harmless(1, ("uniform",), "--recompute-interval K to recompute every K-th layer"),
    "recompute_modules": Harmless("+", ("core_attn",)),
    "weight_decay_incr_style": Harmless(1, ("constant",)),
    "vocab_extra_ids": Harmless(1, ("0",)),
    "remote_device": Harmless(1, ("none",)),
    **_rows(
        Harmless(1, ("1",), "--recompute-interval K to recompute every K-th layer"),
        "recompute_num_layers checkpoint_num_layers",
    ),
    **_rows(
        Harmless(1, ("1",)),
        "context_parallel_size ds_sequence_parallel_size tile_factor "
        "expert_tensor_parallel_size num_distributed_optimizer_instances",
    ),
    **_rows(Harmless(1, ("fp32",)), "exp_avg_dtype exp_avg_sq_dtype main_grads_dtype main_params_dtype"),
    # No token is dropped, and an expert's products are those of one matrix, however tokens reach it.
    **_rows(Harmless(1), "moe_token_dispatcher_type"),
    **_rows(
        Harmless(0),
        "moe_grouped_gemm moe_permute_fusion moe_enable_deepep moe_shared_expert_overlap moe_per_layer_logging "
        "moe_router_fusion",
    ),
    **_rows(Harmless(1, ("1.0", "1")), "head_lr_mult rotary_scaling_factor"),
    # Flags with a replacement.
    **_rows(
        Refused(_STAGES),
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout "
        "account_for_*_in_pipeline_split standalone_embedding_stage",
    ),
    **_rows(Refused(_LAUNCHER), "num_gpus nproc_per_node"),
    **_rows(Refused(_TRACE), "trace trace_dir trace_interval trace_granularity"),
    "data_args_path": Refused("--data-path with the words in the file"),
    **_rows(Refused("--deepspeed and --deepspeed_config"), "deepscale deepscale_config"),
    "warmup": Refused("--lr-warmup-fraction"),
    "batch_size": Refused("--micro-batch-size"),
    "model_parallel_size": Refused("--tensor-model-parallel-size"),
    "padded_vocab_size": Refused("--vocab-size"),
    "train_tokens": Refused("--train-samples, the number of tokens / --seq-length"),
    "lr_decay_tokens": Refused("--lr-decay-samples, the number of tokens / --seq-length"),
    "lr_warmup_tokens": Refused("--lr-warmup-samples, the number of tokens / --seq-length"),
    "rank_order": Refused('"rank_order" in the "ds_ext" section, or --use-tp-pp-dp-mapping'),
    "dataloader_inter_document_masking": Refused("--reset-attention-mask"),
    **{key: Refused(reason=reason) for reason, keys in _REFUSED.items() for key in keys.split()},
}
JSON_KEYS = {flag: row for flag, row in MEGATRON_FLAGS.items() if isinstance(row, JsonKey)}
TRAIN_KEYS = {flag: row for flag, row in MEGATRON_FLAGS.items() if isinstance(row, TrainKeys)}


def row_of(flag: str) -> tuple[str, Row | None]:
    """Return the key and the row of a flag (with its dashes, or a key of "train"); None for an unknown flag.

    An exact key has precedence over patterns, and an earlier pattern over a later one.
    """
    key = flag.removeprefix("--").replace("-", "_")
    if key not in MEGATRON_FLAGS:
        key = next(
            (pattern for pattern in MEGATRON_FLAGS if "*" in pattern and fnmatchcase(key, pattern)), key
        )
    return key, MEGATRON_FLAGS.get(key)
