"""Builders of the module that ``train_gpt.py`` trains: layers of ds_ext, or those of a decoder of transformers."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch

from ...config.deepspeed_json import precision
from ...engine import PipelineEngine, PipelineModule
from ...engine.module_plan import require_auxiliary_loss
from ...errors import ConfigError
from ...hf.export import save_adapter
from ...hf.find import find_split
from ...hf.folder import ModelFolder, read_config
from ...hf.layers import DecoderLayer
from ...hf.lora import Adapters, lora_config
from ...hf.routers import routers_of
from ...hf.specs import NextTokenLoss, decoder_layers
from ...hf.weights import NewWeights, Source, config_of, make_source
from ...model.config import TransformerConfig
from ...planner.job_plan import JobPlan
from ...tensor_parallel import DropoutClock, TensorParallel, skip_initial_values
from ..convert.hf_model import HuggingFaceModel
from ..convert.into_ranks import load_into_ranks
from ..models.gpt import gpt_layer_specs, gpt_loss
from .loop import say

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_builder(
    args: argparse.Namespace, plan: JobPlan, config: TransformerConfig
) -> OwnLayers | DecoderLayers:
    return (DecoderLayers if config.transformer_impl == "transformers" else OwnLayers)(args, plan, config)


class OwnLayers:
    """Builder with the layers of ds_ext. All ranks call each method together.

    Attributes:
        weights: description of the weights of ``--hf-model`` for the plan; "" without it.
        divides_head: whether the model may have a head in parts.
    """

    divides_head = True

    def __init__(self, args: argparse.Namespace, plan: JobPlan, config: TransformerConfig) -> None:
        self._args, self._config = args, config
        require_auxiliary_loss(plan.settings, None)  # raises ConfigError before the ranks meet
        has_weights = args.hf_model and not args.train_from_scratch
        self._folder = HuggingFaceModel(Path(args.hf_model)) if has_weights else None
        self.weights = "" if self._folder is None else f"{args.hf_model}: {self._folder.describe()}"

    def module(self, plan: JobPlan, boundaries: list[int], tp: TensorParallel) -> PipelineModule:
        """Return the module of this rank, without initial weights if :meth:`load` reads them."""
        clock, loss_fn = DropoutClock(), gpt_loss(self._config, tp)
        layers = gpt_layer_specs(self._config, tp, clock, loss_fn.chunked)
        with nullcontext() if self._initial is None else skip_initial_values():
            return PipelineModule(layers, plan, loss_fn=loss_fn, clock=clock, partition_method=boundaries)

    def load(self, engine: PipelineEngine) -> None:
        """Read the weights of the folder, before those of ``--load``."""
        if self._initial is not None:
            load_into_ranks(engine, self._initial)
            say(f"loaded {self._args.hf_model}")

    def finish(self, engine: PipelineEngine) -> None:
        """Do nothing: ``--save`` has only checkpoints."""

    @property
    def _initial(self) -> HuggingFaceModel | None:
        # The weights of a checkpoint replace those of the folder.
        return None if self._args.load else self._folder


class DecoderLayers:
    """Builder with the layers of a decoder of transformers, which read their weights from the folder.

    It has the methods and attributes of :class:`OwnLayers`.
    """

    def __init__(self, args: argparse.Namespace, plan: JobPlan, config: TransformerConfig) -> None:
        self._args, self._config, settings = args, config, plan.settings
        rank, path = config.lora_rank, Path(args.hf_model)
        self._lora = None if rank is None else lora_config(rank)
        dtype = _DTYPES[precision(plan.job.deepspeed)]
        if args.train_from_scratch:
            source: Source = NewWeights(config_of(path), dtype, config.seed)
        else:
            source = make_source(path, dtype)
        split = find_split(source)
        if settings.sequence_slices > 1:
            split.sliced_calls()  # raises ConfigError before the ranks meet
        adapters = None if self._lora is None else Adapters(self._lora, source, split)
        # That of the folder is transformers', that of flags is Megatron's.
        auxiliary_loss = settings.auxiliary_loss or ("per_layer" if args.num_experts else "pooled")
        kind = routers_of(auxiliary_loss, args.moe_z_loss_coeff)
        self._layers, self._loss_fn = decoder_layers(
            source, split, adapters, config.chunked_loss, NextTokenLoss, kind
        )
        require_auxiliary_loss(settings, self._loss_fn)  # likewise
        self.divides_head = True
        try:
            self._layers[-1].in_parts(settings.pipeline_parallel_size)  # likewise
        except ConfigError:
            self.divides_head = False
            if settings.vocabulary_parallel_head:
                raise
        trained = (
            "" if adapters is None else f", frozen, and adapters of rank {rank} with {adapters.elements:,}"
        )
        if plan.layout.tensor_parallel_size > 1:
            sequence = settings.sequence_parallel
            self._layers[0].check_shards(
                plan.layout.tensor_parallel_size, self._loss_fn, sequence
            )  # likewise
        if args.train_from_scratch:
            sizes = sum(layer.num_parameters for layer in self._layers)
            text = f"{read_config(path)['model_type']}, {sizes:,} parameters, new"
        else:
            text = ModelFolder(path).describe()
        self.weights = f"{path}: {text}{trained} (layers of transformers)"

    def module(self, plan: JobPlan, boundaries: list[int], tp: TensorParallel) -> PipelineModule:
        torch.manual_seed(self._config.seed)
        return PipelineModule(
            self._layers,
            plan,
            loss_fn=self._loss_fn,
            partition_method=boundaries,
            base_seed=self._config.seed,
            activation_checkpoint_interval=int(self._config.recompute == "full"),
            checkpointable_layers=[DecoderLayer.__name__],
        )

    def load(self, engine: PipelineEngine) -> None:
        """Do nothing but name the folder: the module has its weights."""
        if self._lora is not None or not (self._args.load or self._args.train_from_scratch):
            say(f"loaded {self._args.hf_model}")

    def finish(self, engine: PipelineEngine) -> None:
        """Write the adapters as a folder of peft."""
        if self._lora is not None and self._args.save:
            folder = Path(self._args.save, "adapter")
            save_adapter(engine, self._lora, folder)
            say(f"adapter   {folder}, for peft")
