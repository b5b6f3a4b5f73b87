"""``ds_ext.from_transformers``: any decoder of transformers as layers for a PipelineModule."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ..errors import ConfigError
from ..tensor_parallel import ChunkedHead, TensorParallel, current_slice
from .find import find_split
from .layers import DecoderHeadPart, DecoderLayer, Embedding, FinalNorm, Head, Positions, TiedHead, embed
from .lora import Adapters
from .routers import AUXILIARY_LOSS, AuxiliaryLoss, Routers, routers_of
from .shards import Vocabulary, check_shards
from .split import Split
from .weights import Source, make_source

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

IGNORE_INDEX = -100  # label of tokens that do not count, in transformers
_TIE = "embedding"
_Loss = TypeVar("_Loss", bound="NextTokenLoss")


def from_transformers(
    model_or_folder: nn.Module | str | Path | PreTrainedConfig,
    *,
    lora: Any = None,
    dtype: torch.dtype | None = None,
    chunked_loss: bool = False,
    auxiliary_loss: AuxiliaryLoss = "pooled",
    z_loss: float = 0.0,
    seed: int = 0,
) -> tuple[list[LayerSpec], CausalLoss]:
    """Split a causal language model of transformers into layers for :class:`ds_ext.PipelineModule`.

    The list has the word embedding, the positions, every decoder layer, the final norm and the head. From a folder,
    a rank reads only the weights of its stages, when they are built. The layers of a model in memory are used as they
    are.

    Args:
        model_or_folder: a transformers model, plain or wrapped by peft; a folder with ``config.json`` and safetensors
            files; or a config of transformers, for new weights.
        lora: ``peft.LoraConfig``: freeze all weights and train adapters in the decoder layers; None: train everything,
            or what a model in memory trains.
        dtype: dtype of the weights from a folder, or of new ones; None: as in the folder or the config.
        chunked_loss: compute head and loss in chunks of tokens, without storing the logits.
        auxiliary_loss: loss of the routers, if ``config.output_router_logits`` is true: "pooled" over all layers, as in
            transformers; or "per_layer", the sum of the losses of all layers, as in Megatron: the config's coefficient
            times E / K times the product of the experts' mean probabilities and shares of the tokens.
        z_loss: coefficient of the routers' z-loss (arXiv 2202.08906), a sum over layers; with "per_layer".
        seed: seed of new weights, which are the same in every layout.

    Returns:
        ``(layers, loss_fn)``. The inputs of a micro-batch are ``ids_BS`` or ``(ids_BS, mask_BS)``, with a mask of 0 for
        padding, and its labels are ``labels_BS``. The loss is the model's: it shifts the labels and ignores -100. All
        counted tokens of a step have the same weight, as with ``num_items_in_batch`` in transformers. PipelineModule
        divides the head with ``vocabulary_parallel_head``, unless it is tied or ``chunked_loss`` would be refused.
        With ``tensor_parallel_size``, the layers are built as shards, see :mod:`.shards`.

    Raises:
        ConfigError: the model cannot be split, the folder is incomplete, or a package is missing; or with
            ``chunked_loss``, the model changes its logits or has another loss than the cross entropy.
    """
    source = make_source(model_or_folder, dtype, seed)
    split = find_split(source)
    adapters = None if lora is None else Adapters(lora, source, split)
    if z_loss and split.routers is None:
        raise ConfigError(
            f"z_loss: needs output_router_logits in the config (got {z_loss:g}, and false). Set it."
        )
    kind = routers_of(auxiliary_loss, z_loss)
    return decoder_layers(source, split, adapters, chunked_loss, CausalLoss, kind)


def decoder_layers(
    source: Source,
    split: Split,
    adapters: Adapters | None,
    chunked_loss: bool,
    loss_class: type[_Loss],
    make_routers: Callable[[int, int, float, Any], Routers] = Routers,
) -> tuple[list[LayerSpec], _Loss]:
    """Return layers and loss function as :func:`from_transformers` does, with a loss function of another class.

    Args:
        make_routers: returns the routers with their loss, from the fields of those in the split.
    """
    trial_loss = CausalLoss(source, Vocabulary())  # shifts the labels, as the model does in the trial
    reason = _reason_for_whole_logits(source, split, trial_loss)
    if chunked_loss and reason:
        raise _needs_whole_logits("chunked_loss", split, reason)
    if split.routers is not None:
        routers = make_routers(*(getattr(split.routers, field.name) for field in dataclasses.fields(Routers)))
        split = dataclasses.replace(split, routers=routers)
    chunked = ChunkedHead(TensorParallel()) if chunked_loss else None
    vocabulary = Vocabulary(chunked, is_whole=bool(reason))
    loss_fn = loss_class(source, vocabulary, split.routers)
    layers = _layer_specs(source, split, adapters, vocabulary)
    # PipelineModule reads these attributes before it builds a layer, see engine.contracts.LayerContract.
    check = functools.partial(check_shards, source, split, adapters, vocabulary)
    layers[-1].in_parts = functools.partial(_head_parts, source, split, adapters, reason)
    for layer, num_parameters in zip(layers, _layer_sizes(source, split), strict=True):
        layer.num_parameters, layer.check_shards = num_parameters, check
    return layers, loss_fn


def _layer_specs(
    source: Source, split: Split, adapters: Adapters | None, vocabulary: Vocabulary
) -> list[LayerSpec]:
    arguments = (source, split, adapters)
    if split.tied:
        tie = {"tied_weight_attr": ["module.weight"]}
        embedding = TiedLayerSpec(_TIE, Embedding, *arguments, forward_fn=embed, **tie)
        tied_head = TiedHead(source, split, vocabulary)
        head = TiedLayerSpec(_TIE, Embedding, *arguments, forward_fn=tied_head, **tie)
    else:
        embedding = LayerSpec(Embedding, *arguments)
        head = LayerSpec(Head, *arguments, vocabulary)
    return [
        embedding,
        LayerSpec(Positions, *arguments),
        *(LayerSpec(DecoderLayer, source, split, index, adapters) for index in range(split.num_layers)),
        LayerSpec(FinalNorm, *arguments),
        head,
    ]


def _head_parts(
    source: Source, split: Split, adapters: Adapters | None, reason: str, parts: int
) -> list[LayerSpec]:
    key = "vocabulary_parallel_head"
    if split.tied:
        raise ConfigError(
            f"{key}: the head of {split.name} is tied to the embedding (got true). Remove {key}."
        )
    if split.routers is not None:
        reason = "the loss of routers, which parts of a head do not get"
    if reason:
        raise _needs_whole_logits(key, split, reason)
    weight: Any = source.reference().get_parameter(f"{split.head}.weight")
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        raise ConfigError(
            f"{key}: parts of a head do not call the hooks of its weight (got some). Remove {key}."
        )
    return [LayerSpec(DecoderHeadPart, source, split, adapters, part, parts) for part in range(parts)]


def _needs_whole_logits(key: str, split: Split, reason: str) -> ConfigError:
    return ConfigError(f"{key}: {split.name} needs whole logits (got {reason}). Remove {key}.")


class NextTokenLoss:
    """Loss function of the model: (logits_BSV, labels_BS) to (sum, count); a label is the token after its own.

    With the loss of routers, the outputs are (logits_BSV, sums), and the loss of the micro-batch has two terms.

    Attributes:
        vocabulary: head of the model. With a chunked loss, hidden_BSD takes the place of logits_BSV.
        takes_token_losses: with the parts of a head it gets the losses of the tokens, (B, S), instead of logits_BSV.
    """

    takes_token_losses = True

    def __init__(self, source: Source, vocabulary: Vocabulary, routers: Routers | None = None) -> None:
        self._function, self._routers = source.loss_function, routers
        self._vocab_size = source.config.get_text_config().vocab_size
        self.vocabulary = vocabulary

    @property
    def auxiliary_loss(self) -> AuxiliaryLoss | None:
        """Kind of the loss of routers; None without it."""
        return None if self._routers is None else self._routers.auxiliary_loss

    def __call__(self, outputs: Any, labels_BS: Tensor) -> Any:
        if self._routers is None:
            return self._pair(outputs, labels_BS)
        outputs, sums = outputs
        return {"": self._pair(outputs, labels_BS), AUXILIARY_LOSS: self._routers.loss(sums)}

    def _pair(self, outputs: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        return self._sum(outputs, labels_BS), (labels_BS != IGNORE_INDEX).sum()

    def _sum(self, outputs: Tensor, labels_BS: Tensor) -> Tensor:
        if outputs.shape == labels_BS.shape:  # losses of the tokens, from the parts of a head
            return outputs.sum()
        if self.vocabulary.chunked is not None:
            return self.vocabulary.chunked.loss(outputs, labels_BS, self._vocab_size)
        if self.vocabulary.tp.size > 1 and not self.vocabulary.is_whole:
            return self.vocabulary.loss(outputs, labels_BS)
        arguments = {"logits": outputs, "vocab_size": self._vocab_size, "num_items_in_batch": 1}
        return self._function(labels=None, shift_labels=labels_BS, **arguments)

    def counts(self, labels_BS: Tensor) -> Tensor:
        return (labels_BS != IGNORE_INDEX).sum()

    def return_logits(self, outputs: Any) -> Tensor:
        if self._routers is not None:
            outputs, _ = outputs
        if self.vocabulary.chunked is not None:
            outputs = self.vocabulary.chunked.logits(outputs)
        elif self.vocabulary.is_whole:
            return outputs
        return self.vocabulary.gather(outputs)


class CausalLoss(NextTokenLoss):
    """Loss function of the model, whose labels are the tokens themselves.

    In slices of sequences, ``labels_BS`` are those of :meth:`shift_labels`.
    """

    def _pair(self, outputs: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        if current_slice() is not None:
            return super()._pair(outputs, labels_BS)
        return self._sum(outputs, self.shift_labels(labels_BS)), self.counts(labels_BS)

    def counts(self, labels_BS: Tensor) -> Tensor:
        return (labels_BS[:, 1:] != IGNORE_INDEX).sum()

    def shift_labels(self, labels_BS: Tensor) -> Tensor:
        """Return the next label of every token, from which the slices of a sample are split."""
        return nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORE_INDEX)


def _reason_for_whole_logits(source: Source, split: Split, loss_fn: CausalLoss) -> str:
    """Return why the loss needs whole logits, "" if it does not. Raise ConfigError if the model adds another loss."""
    head = Head(source, dataclasses.replace(split, tied=True), None)
    vocab_size = source.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    logits_BSV = torch.randn(1, 6, vocab_size, generator=generator)
    labels_BS = torch.randint(vocab_size, (1, 6), generator=generator)
    labels_BS[0, 2] = IGNORE_INDEX
    projected: list[Tensor] = []
    head.set_projection(
        torch.ones(()).expand(vocab_size, split.width), lambda x_BSD: projected.append(x_BSD) or logits_BSV
    )
    hidden_BSD = torch.randn(1, 6, split.width, generator=generator)
    routers_loss = _trial_of_routers(head, generator)
    with torch.no_grad():
        model_loss = float(head.loss(hidden_BSD, labels_BS)) - routers_loss
        outputs_BSV = head(hidden_BSD)
        total, count = loss_fn(outputs_BSV, labels_BS)
        logits_loss = float(total / count)
    if not math.isclose(model_loss, logits_loss, rel_tol=1e-5):
        raise ConfigError(
            f"{type(source.config).__name__}: cannot be split, because its forward adds to the loss of the logits "
            f"(got {model_loss:.6g}, and {logits_loss:.6g} without). Set the extra loss to 0 in the config."
        )
    reason = _reason_of_head(source, split, (projected[-1], hidden_BSD), (outputs_BSV, logits_BSV))
    targets_N = loss_fn.shift_labels(labels_BS).flatten()
    plain = float(nn.functional.cross_entropy(logits_BSV[0], targets_N, ignore_index=IGNORE_INDEX))
    if not reason and not math.isclose(logits_loss, plain, rel_tol=1e-5):
        reason = f"its loss is not the cross entropy ({logits_loss:.6g} for {plain:.6g})"
    return reason


def _trial_of_routers(head: Head, generator: torch.Generator) -> float:
    """Return the loss of random logits of two layers, which the head's model adds to its loss."""
    if (routers := head.split.routers) is None:
        return 0.0
    head.router_logits = tuple(torch.randn(6, routers.experts, generator=generator) for _ in range(2))
    sums = routers.zeros()
    for logits_NE in head.router_logits:
        sums = routers.add(sums, logits_NE, None)
    return float(routers.loss(sums))


def _reason_of_head(source: Source, split: Split, *pairs: tuple[Tensor, Tensor]) -> str:
    """Return why logits are not the product of hidden states and the head's weight; "" if they are.

    ``pairs`` are (actual, expected) input and output of the head in a trial.
    """
    projection: Any = source.reference().get_submodule(split.head)
    head_class = type(projection)
    if head_class is not nn.Linear:
        return f"a head of class {head_class.__module__}.{head_class.__qualname__}"
    if projection.bias is not None:
        return f"a head with a bias of {projection.bias.numel()} elements"
    if "forward" in vars(projection) or projection._forward_hooks or projection._forward_pre_hooks:
        return "a head with hooks or another forward"
    values = source.config.get_text_config().to_dict().items()
    settings = "".join(f"{key} {value}, " for key, value in values if "logit" in key and type(value) is float)
    for name, (value, expected) in zip(("hidden state", "logit"), pairs, strict=True):
        if not torch.equal(value, expected):
            place = (value - expected).abs().argmax()
            numbers = f"{value.flatten()[place]:.6g} for {expected.flatten()[place]:.6g}"
            return f"{settings}a {name} of {numbers} of the plain product"
    return ""


def _layer_sizes(source: Source, split: Split) -> list[int]:
    """Return the number of parameters of every pipeline layer, frozen ones included."""
    model = source.skeleton()

    def size(*paths: str) -> int:
        return sum(
            parameter.numel() for path in paths for parameter in model.get_submodule(path).parameters()
        )

    layers = [size(f"{split.layers}.{index}") for index in range(split.num_layers)]
    return [size(split.embedding), size(*split.before), *layers, size(*split.after), size(split.head)]
