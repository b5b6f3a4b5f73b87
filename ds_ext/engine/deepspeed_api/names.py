"""Private names of DeepSpeed, torch and transformers on which this package relies, and their check.

A renamed hook or attribute would not fail: DeepSpeed's own code would run, gradients would stay unreduced, checkpoints
would lack states. Modules and classes are checked before anything is built, objects right after their constructors.
Names that a file imports at its top are not listed, because their import fails.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from packaging.version import Version
from torch import nn
from torch._ops import OpOverloadPacket

from ...environment import package_version
from ...errors import ConfigError
from ..types import Optimizer

# Newest versions whose numbers were compared. Newer ones run if they have every name.
TESTED = {"deepspeed": "0.19.8", "torch": "2.15.0", "transformers": "5.24.0", "python": "3.13"}
ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
MODULE = "deepspeed.runtime.pipe.module:PipelineModule"
ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
SCALERS = "deepspeed.runtime.fp16.loss_scaler"
FRAGMENT = "deepspeed.utils.tensor_fragment"
C10D = "torch.distributed.distributed_c10d"
GATHER = (
    "all_gather_dp_groups(groups_flat,partitioned_param_groups,dp_process_group,start_alignment_factor,"
    "allgather_bucket_size)"
)
SDPA, QKV, SEEN = "_scaled_dot_product", "query,key,value", "out,logsumexp"  # of slice_attention.py
RANDOM = "philox_seed,philox_offset"
LENGTHS = "cum_seq_q,cum_seq_k,max_q,max_k,dropout_p,is_causal"
EFFICIENT_BACKWARD = f"grad_out_,{QKV},attn_bias,{SEEN},{RANDOM},dropout_p,grad_input_mask,is_causal"
# "own": function of the class itself, because that of its base does nothing. "of objects": set by the owner's
# constructor. "of parameters": set by it on every parameter of the owner.
Kind = Literal["callable", "own", "class", "value", "field", "of objects", "of parameters"]


@dataclass(frozen=True)
class PrivateName:
    """Name that another package may change without notice.

    Attributes:
        owner: ``module`` or ``module:Class``.
        parameters: names of the first parameters, without ``self``, of a callable that this package calls or overrides;
            others must have defaults. None: not checked.
    """

    owner: str
    name: str
    kind: Kind
    parameters: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    @property
    def package(self) -> str:
        root = self.owner.partition(".")[0].partition(":")[0]
        return "python" if root in sys.stdlib_module_names else root

    def is_missing(self) -> bool:
        """Return whether the module or class lacks the name, or has something else under it."""
        try:
            owner = pkgutil.resolve_name(self.owner)
        except (ImportError, AttributeError):
            return True
        if self.kind in ("of objects", "of parameters"):
            return False
        if self.kind == "field":
            return self.name not in owner.__annotations__
        if self.kind == "own":
            return not (callable(vars(owner).get(self.name)) and self._fits(vars(owner)[self.name]))
        # A base class of another package, such as nn.Module, may have a different method of this name.
        bases = [c for c in getattr(owner, "__mro__", ()) if c.__module__.partition(".")[0] == self.package]
        if bases and not any(self.name in vars(base) for base in bases):
            return True
        value = getattr(owner, self.name, None)
        if self.kind == "callable":
            return not (callable(value) and self._fits(value))
        if self.kind == "class":
            return not isinstance(value, type)
        return value is None

    def _fits(self, function: Callable[..., object]) -> bool:
        if self.parameters is None:
            return True
        parameters = [(name, optional) for name, optional in _signature(function) if name != "self"]
        first, others = parameters[: len(self.parameters)], parameters[len(self.parameters) :]
        return tuple(name for name, _ in first) == self.parameters and all(optional for _, optional in others)


@functools.cache
def _signature(function: Callable[..., object]) -> list[tuple[str, bool]]:
    """Return the parameters of a function or of an operator of torch, and whether a call may omit them."""
    if isinstance(function, OpOverloadPacket):
        return [(a.name, a.has_default_value()) for a in function.default._schema.arguments]
    parameters = inspect.signature(function).parameters.values()
    return [
        (p.name, p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)) for p in parameters
    ]


def _parse(table: str) -> tuple[PrivateName, ...]:
    """Return the names of a table with lines ``owner kind: name name(parameter,parameter)``."""
    names: list[PrivateName] = []
    for line in table.strip().splitlines():
        owner_and_kind, attributes = line.strip().split(": ")
        owner, kind = owner_and_kind.split(" ", 1)
        for attribute in attributes.split():
            name, is_called, inner = attribute.rstrip(")").partition("(")
            parameters = tuple(filter(None, inner.split(","))) if is_called else None
            names.append(PrivateName(owner, name, cast(Kind, kind), parameters))
    return tuple(names)


# Methods that this package overrides: without them, DeepSpeed's code would run instead.
OVERRIDDEN = _parse(f"""
    {ENGINE} callable: train_batch(data_iter) set_train_batch_size(train_batch_size) set_dataloader(loader)
    {ENGINE} callable: eval_batch(data_iter,return_logits,compute_loss,reduce_output,bcast_loss,num_micro_batches)
    {ENGINE} callable: set_dataiterator(iterator) get_lr() is_first_stage() is_last_stage() clip_fp32_gradients()
    {ENGINE} callable: save_checkpoint(save_dir,tag,client_state,save_latest,exclude_frozen_parameters)
    {ENGINE} callable: load_checkpoint(load_dir,tag,load_module_strict,load_optimizer_states)
    {ENGINE} callable: _broadcast_model() _build_data_iter(dataset) _train_schedule() _exec_schedule(pipe_schedule)
    {ENGINE} callable: _configure_optimizer(client_optimizer,model_parameters) _get_gradients_for_reduction()
    {ENGINE} callable: _exec_reduce_tied_grads() _exec_reduce_grads() _exec_optimizer_step(lr_kwargs)
    {ENGINE} callable: _take_model_step(lr_kwargs) _aggregate_total_loss()
    {ENGINE} value: _INSTRUCTION_MAP
    {MODULE} callable: _partition_layers(method) _count_layer_params() _build() stage_owner(layer_idx)
    {MODULE} callable: _index_tied_modules() forward(forward_input) get_tied_weights_and_groups()
    {MODULE} callable: _synchronize_tied_weights() get_additional_losses() compile
    {MODULE} callable: save_state_dict(save_dir,checkpoint_engine,exclude_frozen_params)
    {MODULE} callable: load_state_dir(load_dir,checkpoint_engine,strict)
""")
NAMES = OVERRIDDEN + _parse(f"""
    {ENGINE} callable: _configure_python_gc() _get_optimizer_loss_scale()
    {ENGINE} value: _MUON_HALF_KEYS _ADAM_HALF_KEYS
    {ENGINE} of objects: _global_grad_norm _step_applied param_names
    {MODULE} callable: _set_bounds(start,stop) _is_checkpointable(funcs)
    {MODULE} of objects: _layer_specs _num_layers
    {MODULE} of parameters: ds_pipe_replicated
    deepspeed.runtime.pipe.module class: PipelineParallelGrid
    {ZERO} own: backward_epilogue
    {ZERO} callable: backward_prologue() get_gradient_for_reduction(param) reduce_gradients(pipeline_parallel)
    {ZERO} callable: average_tensor(tensor,communication_data_type) set_gradient_accumulation_boundary(is_boundary)
    {ZERO} callable: _add_full_reduction_to_compact_grad_partition(reduced_tensor,communication_data_type)
    {ZERO} callable: scaled_global_norm(norm_type) unscale_and_clip_grads(grad_groups_flat,total_norm)
    {ZERO} callable: update_lp_params() scale_if_loss(value)
    {ZERO} of objects: optimizer bit16_groups use_grad_accum_attribute gradient_accumulation_dtype
    {ZERO} of objects: cpu_offload overlap_comm contiguous_gradients loss_scaler
    {ZERO} callable: get_grad_norm_direct(gradients,params,norm_type)
    {ZERO} callable: complete_grad_norm_calculation_for_cpu_offload(params)
    {ZERO} callable: _muon_update_lacks_loss_scale(group_index) _is_muon_group(tensor_list)
    {ZERO} of objects: bit16_groups_flat params_in_partition averaged_gradients
    {ZERO} of objects: _hp_optimizer_states_linked model_parallel_group real_dp_process_group
    {ZERO} of objects: parallel_partitioned_bit16_groups single_partition_of_fp32_groups
    {ZERO} of parameters: _hp_mapping grad_accum
    {BF16} own: backward_prologue() backward_epilogue(update_hp_grads,clear_lp_grads)
    {BF16} callable: update_lp_params() scale_if_loss(value)
    {BF16} of objects: optimizer bf16_groups fp32_groups_gradients fp32_groups_has_gradients
    {BF16} callable: get_grads_for_norm(for_clipping)
    {BF16} of objects: mpu fp32_groups_gradients_flat fp32_groups_gradient_flat_partition
    {BF16} of objects: _hp_optimizer_states_linked real_dp_process_group
    {BF16} of objects: bf16_partitioned_groups fp32_groups_flat_partition
    {BF16} of parameters: _hp_mapping
    deepspeed.runtime.bf16_optimizer callable: {GATHER}
    deepspeed.runtime.zero.stage_1_and_2 callable: {GATHER}
    {SCALERS}:LossScalerBase of objects: cur_scale dynamic
    {SCALERS}:DynamicLossScaler of objects: cur_iter last_overflow_iter cur_hysteresis
    {FRAGMENT}:tensor_fragment field: lp_fragment_address hp_fragment_address hp_fragment
    {FRAGMENT}:fragment_address field: start numel
    {C10D} callable: _get_default_store()
    {C10D}:_world value: pg_map
    torch.distributed:ProcessGroup value: bound_device_id
    torch.distributed.algorithms._checkpoint.checkpoint_wrapper value: _CHECKPOINT_WRAPPED_MODULE
    torch.autograd.profiler value: _is_profiler_enabled
    torch.autograd.forward_ad value: _current_level
    torch._C callable: _are_functorch_transforms_active
    torch:Tensor value: _version _backward_hooks _post_accumulate_grad_hooks
    torch:UntypedStorage callable: _share_cuda_ _new_shared_cuda
    torch:ops.aten callable: _assert_async _unsafe_view(size) _fused_sdp_choice({QKV},attn_mask,dropout_p,is_causal)
    torch:ops.aten callable: {SDPA}_flash_attention_for_cpu({QKV},dropout_p,is_causal)
    torch:ops.aten callable: {SDPA}_flash_attention({QKV},dropout_p,is_causal)
    torch:ops.aten callable: {SDPA}_efficient_attention({QKV},attn_bias,compute_log_sumexp,dropout_p,is_causal)
    torch:ops.aten callable: {SDPA}_cudnn_attention({QKV},attn_bias,compute_log_sumexp,dropout_p,is_causal)
    torch:ops.aten callable: {SDPA}_flash_attention_for_cpu_backward(grad_out,{QKV},{SEEN},dropout_p,is_causal)
    torch:ops.aten callable: {SDPA}_flash_attention_backward(grad_out,{QKV},{SEEN},{LENGTHS},{RANDOM})
    torch:ops.aten callable: {SDPA}_efficient_attention_backward({EFFICIENT_BACKWARD})
    torch:ops.aten callable: {SDPA}_cudnn_attention_backward(grad_out,{QKV},{SEEN},{RANDOM},attn_bias,{LENGTHS})
    torch.utils.file_baton:FileBaton callable: wait()
    torch.nn:Module of objects: _parameters _buffers _non_persistent_buffers_set _forward_hooks _forward_pre_hooks
    atexit callable: _run_exitfuncs
    transformers:AutoModelForCausalLM value: _model_mapping
    transformers:PreTrainedModel callable: _from_config(config) tie_weights
    transformers.core_model_loading callable: convert_and_load_state_dict_in_model(model,state_dict,load_config)
    transformers.core_model_loading callable: rename_source_key(source_key,weight_renamings,weight_converters)
    transformers.core_model_loading class: WeightConverter WeightRenaming
    transformers.modeling_utils class: LoadStateDictConfig
    transformers.conversion_mapping callable: get_model_conversion_mapping(model)
""")
if not hasattr(torch.distributed, "set_timeout"):  # public since torch 2.14
    NAMES += _parse(f"{C10D} callable: _set_pg_timeout(timeout,group)")
# tensor_parallel does without these, but not with others of the same name.
NAMES += tuple(
    name
    for name in _parse("""
        torch.autograd.graph callable: _engine_run_backward(t_outputs)
        torch._C._autograd callable: _top_saved_tensors_default_hooks
    """)
    if not replace(name, parameters=None).is_missing()
)


def untested_versions() -> list[str]:
    installed = {package: package_version(package) for package in TESTED}
    return [
        f"{package} {version} is newer than {TESTED[package]}, up to which ds_ext is tested; all private names exist"
        for package, version in installed.items()
        if version is not None and Version(Version(version).public) > Version(TESTED[package])
    ]


def require_names(*packages: str) -> None:
    """Check the modules and classes of ``packages``. Raises one ConfigError for all missing names."""
    _require(name for name in NAMES if name.package in packages and name.is_missing())


def require_built(*owners: object) -> None:
    """Check engine, module, optimizers and loss scalers, of any class, after their construction. None is skipped."""
    names = [
        (name, owner)
        for name in NAMES
        if name.kind in ("of objects", "of parameters")
        for owner in owners
        if isinstance(owner, pkgutil.resolve_name(name.owner))
    ]
    _require(name for name, owner in names if name.kind == "of objects" and not hasattr(owner, name.name))
    _require(
        name
        for name, owner in names
        if name.kind == "of parameters" and not all(hasattr(p, name.name) for p in _parameters(owner))
    )


def _require(missing: Iterable[PrivateName]) -> None:
    names = list(missing)
    if not names:
        return
    packages = dict.fromkeys(name.package for name in names)
    installed = [f"{package} {package_version(package) or platform.python_version()}" for package in packages]
    tested = [f"{package}=={TESTED[package]}" for package in packages]
    raise ConfigError(
        f"{', '.join(name.key for name in names)}: missing or changed in the installed version, and ds_ext needs it "
        f"(got {', '.join(installed)}). Use the tested version: "
        f"{'pip install ' * ('python' not in packages)}{' '.join(tested)}"
    )


def _parameters(owner: object) -> Iterable[nn.Parameter]:
    if isinstance(owner, nn.Module):
        return owner.parameters()
    return [parameter for group in model_groups(owner) for parameter in group]


def model_groups(optimizer: Optimizer) -> Sequence[list[nn.Parameter]]:
    """Return the model's parameters in each group of a ZeRO or bf16 optimizer of DeepSpeed."""
    return optimizer.bf16_groups if isinstance(optimizer, BF16_Optimizer) else optimizer.bit16_groups


def loss_scaler(optimizer: Optimizer) -> LossScalerBase | None:
    return optimizer.loss_scaler if isinstance(optimizer, DeepSpeedZeroOptimizer) else None
