"""Megatron-style tensor parallelism. Process groups are arguments; the package has no global group."""

from ds_ext.tensor_parallel.group import TensorParallel, create_tensor_parallel
from ds_ext.tensor_parallel.layers import (
    ColumnParallelLinear,
    InitMethod,
    RowParallelLinear,
    VocabParallelEmbedding,
    enter_tensor_parallel,
    shard_dim,
    skip_initial_values,
    unpadded_size,
)
from ds_ext.tensor_parallel.loss import IGNORE_INDEX, vocab_parallel_cross_entropy
from ds_ext.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    shared_parameters,
)
from ds_ext.tensor_parallel.random import (
    DropoutClock,
    KeyedDropout,
    KeyedLayers,
    keyed_normal,
    keyed_rng,
    layer_key,
    mix_key,
)
from ds_ext.tensor_parallel.weight_gradients import (
    Deferral,
    DeferralWatch,
    WeightGradients,
    address,
    backward,
    deferrable,
    deferring,
    embedding,
    let_defer,
    linear,
)

__all__ = [
    "IGNORE_INDEX",
    "ColumnParallelLinear",
    "Deferral",
    "DeferralWatch",
    "DropoutClock",
    "InitMethod",
    "KeyedDropout",
    "KeyedLayers",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "WeightGradients",
    "address",
    "backward",
    "copy_to_tensor_model_parallel_region",
    "create_tensor_parallel",
    "deferrable",
    "deferring",
    "embedding",
    "enter_tensor_parallel",
    "gather_from_sequence_parallel_region",
    "keyed_normal",
    "keyed_rng",
    "layer_key",
    "let_defer",
    "linear",
    "mix_key",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "shard_dim",
    "shared_parameters",
    "skip_initial_values",
    "unpadded_size",
    "vocab_parallel_cross_entropy",
]
