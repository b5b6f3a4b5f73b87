"""Pipeline layers of a transformers decoder: embedding, positions, decoder layers, final norm, head.

Every layer runs code of the model itself. Positions, FinalNorm and Head call the model's own forward on a skeleton that
has only the weights of that part. Recorders stand in for the decoder layers. Masks and rotary embeddings are computed
once per micro-batch, in Positions. They travel to the decoder layers with the hidden states, as a tuple of tensors; an
absent mask travels as an empty tensor.

B: batch, S: sequence, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..engine.deepspeed_api.device import current_device
from ..engine.modes import evaluating
from ..experts import replace_experts
from ..tensor_parallel import (
    HeadPart,
    TensorParallel,
    current_sequence_parallel,
    current_slice,
    current_tensor_parallel,
    earlier_slices,
    gather_tokens,
    slice_start,
    split_tokens,
)
from .lora import Adapters
from .routers import Routers
from .shard_trial import ShardTrial
from .shards import (
    Entry,
    Shards,
    Vocabulary,
    can_divide_embedding,
    divide_embedding,
    divide_rows,
    padded_rows,
    vocabulary_rows,
)
from .split import NotSplittable, Recorder, Shared, Split
from .weights import Source

if TYPE_CHECKING:
    from .slices import SliceCache


class Embedding(nn.Module):
    """Word embedding: ids_BS, or (ids_BS, mask_BS), to (embeds_BSD,) or (embeds_BSD, mask_BS)."""

    def __init__(self, source: Source, split: Split, adapters: Adapters | None) -> None:
        super().__init__()
        self.module = source.submodule(split.embedding)
        is_divided = current_tensor_parallel().size > 1 and can_divide_embedding(self.module)
        self.tp = current_tensor_parallel() if is_divided else TensorParallel()
        if is_divided:
            divide_embedding(self.module, self.tp)
        if adapters is not None:
            self.requires_grad_(False)

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        ids_BS, *mask = (inputs,) if isinstance(inputs, Tensor) else inputs
        return self.module(ids_BS), *mask


def embed(layer: Embedding, inputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return layer(inputs)


class _Part(nn.Module):
    """Skeleton of the model with the weights of some modules, whose decoder layers are not used."""

    def __init__(self, source: Source, split: Split, paths: Sequence[str], adapters: Adapters | None) -> None:
        super().__init__()
        self.split = split
        skeleton = source.skeleton()
        for path in paths:
            skeleton.set_submodule(path, source.submodule(path))
        self._dropped = _drop_weights(skeleton, [skeleton.get_submodule(path) for path in paths])
        if adapters is not None:
            skeleton.requires_grad_(False)
        self.skeleton = skeleton.train()  # models of from_pretrained are in evaluation mode
        layers = skeleton.get_submodule(split.layers)
        for module in layers.modules():
            module._buffers = dict.fromkeys(module._buffers)

    @property
    def backbone(self) -> Any:
        return self.skeleton.get_submodule(self.split.backbone)


class _AllRecorded(Exception):
    """The forward has reached the last decoder layer."""


class Positions(_Part):
    """Everything between the word embedding and the first decoder layer: positions, masks, rotary embeddings.

    Returns (hidden_BSD, *shared), where the shared tensors are the shared arguments of the split. With the loss of
    routers, their sums and the padding mask follow.
    """

    def __init__(self, source: Source, split: Split, adapters: Adapters | None) -> None:
        super().__init__(source, split, split.before, adapters)
        self.tokens = current_sequence_parallel()
        self._recorder = Recorder(self.skeleton.get_submodule(split.layers), self._output)
        config = source.config.get_text_config()
        self._is_eager = getattr(config, "_attn_implementation", None) == "eager"
        for module in self.skeleton.modules():
            if "longrope" in str(getattr(module, "rope_type", "")):  # a name, or one for every kind of layer
                module.forward = functools.partial(_rotary_of_sample, module.forward)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        from .slices import cache_arguments

        embeds_BSD, *masks = inputs
        calls = self.split.calls()
        mask = None
        if masks:  # with the tokens of earlier slices
            mask = torch.cat([*(m for (m,) in earlier_slices(self, masks[0])), masks[0]], 1)
            if self._is_eager and current_slice() is not None:
                self._require_padding_last(mask)
        arguments = cache_arguments(self.backbone, _slice_cache(None))
        self._recorder.take()  # those of a forward that failed
        with contextlib.suppress(_AllRecorded):
            self.backbone(inputs_embeds=embeds_BSD, attention_mask=mask, **arguments)
        records = self._recorder.take()
        hidden_BSD = self.split.hidden_states(records[0])
        shared = calls.shared_tensors(records)
        if self.split.routers is not None:
            sums = self.split.routers.zeros(hidden_BSD.device)
            shared += [sums, None if mask is None else mask.bool()]
        shared = (hidden_BSD.new_empty(0, dtype=torch.bool) if t is None else t for t in shared)
        return split_tokens(hidden_BSD, self.tokens), *shared

    def _require_padding_last(self, mask_BS: Tensor) -> None:
        """Raise ConfigError for padding before tokens: without a key to read, eager attention reads all of them."""
        is_padding_BS = mask_BS == 0
        early_B = is_padding_BS[:, 0] | (is_padding_BS[:, :-1] & ~is_padding_BS[:, 1:]).any(1)
        if early_B.any():
            raise self.split.no_slices(
                f"its eager attention of padding before tokens may read all slices (got {int(early_B.sum())} of "
                f"{mask_BS.size(0)} samples). Pad at the end, or load the model with attn_implementation "
                f'"sdpa" if it has that'
            )

    def _output(self, index: int, record: tuple[Any, ...]) -> Any:
        if index == self.split.num_layers - 1:
            raise _AllRecorded
        return self.split.layer_output(self.split.hidden_states(record))


class DecoderLayer(nn.Module):
    """One decoder layer: (hidden_BSD, *shared) to the same with new hidden states."""

    def __init__(self, source: Source, split: Split, index: int, adapters: Adapters | None) -> None:
        super().__init__()
        self.split = split
        self.index = index
        self.path = f"{split.layers}.{index}"
        self.base_model: str = source.config.name_or_path
        self._entry = Entry(TensorParallel())
        entry = Entry(current_tensor_parallel(), current_sequence_parallel())
        divide = functools.partial(Shards(split.plan, split.name, entry).divide, self.path)
        divided = None
        if entry.tp.size > 1 and adapters is None:
            kind = self._kind(source.reference().get_submodule(self.path))
            divided = source.divided(self.path, divide, entry.tp) if kind in shards_tried(source) else None
        self.module = (source.submodule(self.path) if divided is None else divided).train()
        if adapters is not None:
            adapters.insert(source, split, index, self.module)
        replace_experts(self.module)
        if divided is None and entry.tp.size > 1:
            self._divide(source, entry, divide)
        self._entry = entry

    def _kind(self, layer: nn.Module) -> str:
        """Return a text that equals that of the layers whose shards compute alike."""
        return f"{layer} {self.split.whole.layers[self.index].leaves}"

    def _divide(self, source: Source, entry: Entry, divide: Callable[[nn.Module], None]) -> None:
        """Divide the layer into shards; the first one of each kind is tried."""
        tried, kind = shards_tried(source), self._kind(self.module)
        if kind in tried:
            divide(self.module)
            return
        tried.add(kind)
        before = next(self.module.parameters()).device
        self.module.to(current_device())  # that of the group's collectives
        trial = ShardTrial(self.split, self.path, self.module, self._try(source), entry.tp)
        divide(self.module)
        self._entry = entry
        trial.check()
        self.module.to(before)

    def _try(self, source: Source) -> Callable[[Tensor], Tensor]:
        """Return a function that runs this layer behind the model's positions."""
        positions = Positions(source, self.split, None)
        positions.tokens = TensorParallel()  # the whole layer needs all tokens

        def run(embeds_BSD: Tensor) -> Tensor:
            with evaluating(positions):  # without dropout
                hidden_BSD, *shared = positions.to(embeds_BSD.device)((embeds_BSD,))
            tokens = self._entry.tokens
            return gather_tokens(self((split_tokens(hidden_BSD, tokens), *shared))[0], tokens)

        return run

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self.split.routers is not None:
            return self._forward_with_routers(self.split.routers, inputs)
        return self._forward(inputs)

    def _forward_with_routers(self, routers: Routers, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Add the sums of this layer's routers to those of the layers before."""
        *others, sums, mask_BS = inputs
        with routers.recording(self.module) as layer_logits:
            outputs = self._forward(others)
        for logits_NE in layer_logits:
            sums = routers.add(sums, logits_NE, mask_BS.flatten() if mask_BS.numel() else None)
        return *outputs, sums, mask_BS

    def _forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        hidden_BSD, *shared = inputs
        calls, cache = self.split.calls(), _slice_cache(self)
        # Messages make every floating-point tensor a leaf with a gradient. Masks and angles need none.
        shared = [
            t if layout.differentiable else t.detach() for t, layout in zip(shared, calls.shared, strict=True)
        ]
        tensors = [t if t.numel() else None for t in shared]
        args, kwargs = calls.layers[self.index].arguments(hidden_BSD, tensors, cache)
        try:
            output = self.module(*args, **kwargs)
        except NotSplittable as error:
            raise self.split.no_slices(error) from None
        finally:
            self._entry.clear()
        if cache is not None and not cache.updates:
            raise self.split.no_slices(self._reason_without_update())
        return (output[0] if self.split.tuple_size else output), *shared

    def _reason_without_update(self) -> str:
        if getattr(self.module, "gradient_checkpointing", False):
            return (
                "its own gradient checkpointing drops keys and values (call gradient_checkpointing_disable(), and set "
                "activation_checkpoint_interval in PipelineModule)"
            )
        return f"decoder layer {self.index} keeps no keys and values"

    def cut_sequence(self, inputs: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the inputs for tokens ``start`` to ``stop`` of a sequence, as Positions returns them for a slice."""
        hidden_BSD, *shared = inputs
        return hidden_BSD[:, start:stop], *(
            _cut_shared(tensor, layout, start, stop)
            for tensor, layout in zip(shared, self.split.sliced_calls().shared, strict=True)
        )


class FinalNorm(_Part):
    """Everything in the backbone after the last decoder layer: (hidden_BSD, *shared) to hidden_BSD.

    With the loss of routers, their sums follow, here and behind the head.
    """

    def __init__(self, source: Source, split: Split, adapters: Adapters | None) -> None:
        super().__init__(source, split, split.after, adapters)
        self._tokens = current_sequence_parallel()
        self._recorder = Recorder(self.skeleton.get_submodule(split.layers), self._output)
        self._hidden: Tensor | None = None
        self._nan: Tensor | None = None

    def forward(self, inputs: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        normed_BSD = self._norm(inputs[0])
        return normed_BSD if self.split.routers is None else (normed_BSD, inputs[-2])

    def _norm(self, hidden_BSD: Tensor) -> Tensor:
        hidden_BSD = gather_tokens(hidden_BSD, self._tokens)
        # The parts before the decoder layers run too, on NaN: nothing of them can reach the result unnoticed.
        nan = self._fill_dropped_with_nan(hidden_BSD)
        embeds_BSD = nan.expand(*hidden_BSD.shape[:2], self.split.width)
        self._hidden = hidden_BSD
        try:
            return self.backbone(inputs_embeds=embeds_BSD, use_cache=False).last_hidden_state
        finally:
            self._hidden = None
            self._recorder.take()

    def _fill_dropped_with_nan(self, hidden_BSD: Tensor) -> Tensor:
        """Set the missing weights to NaN, with the device and dtype of ``hidden_BSD``. Return the scalar."""
        nan = self._nan
        if nan is None or nan.device != hidden_BSD.device or nan.dtype != hidden_BSD.dtype:
            self._nan = nan = hidden_BSD.new_full((), float("nan"))
            for module, key, shape in self._dropped:
                # Not registered: it is no weight, and takes no memory.
                module.__dict__[key] = nan.expand(shape)
        return nan

    def _output(self, index: int, record: tuple[Any, ...]) -> Any:
        assert self._hidden is not None
        return self.split.layer_output(self._hidden)


class Head(_Part):
    """Output projection, with the model's changes of the logits: hidden_BSD to logits_BSV, or to those of this rank.

    With a chunked loss, it returns the hidden states, and ``vocabulary.chunked`` has the weight.
    """

    def __init__(
        self, source: Source, split: Split, adapters: Adapters | None, vocabulary: Vocabulary | None = None
    ) -> None:
        super().__init__(source, split, () if split.tied else (split.head,), adapters)
        self._vocabulary = vocabulary or Vocabulary()
        self._hidden: Tensor | None = None
        self.router_logits: tuple[Tensor, ...] | None = None  # of a trial
        if not split.tied:
            self._divide(self.skeleton.get_submodule(split.head))
        self.backbone.forward = lambda *args, **kwargs: Outputs(self._hidden, self.router_logits)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return _beside_sums(self._project, inputs)

    def _project(self, hidden_BSD: Tensor) -> Tensor:
        if self._vocabulary.chunked is not None:
            projection: Any = self.skeleton.get_submodule(self.split.head)
            return self._vocabulary.chunked.enter(hidden_BSD, projection.weight)
        return self._run(hidden_BSD).logits

    def _divide(self, projection: Any) -> None:
        """Keep this rank's rows of the projection."""
        tp, size = current_tensor_parallel(), len(projection.weight)
        if tp.size == 1 or type(cast(object, projection)) is not nn.Linear or "forward" in vars(projection):
            return
        divide_rows(projection.weight, tp)
        if projection.bias is not None:
            divide_rows(projection.bias, tp)
        self._vocabulary.divide(tp, size)
        projection.forward = lambda x_BSD: self._vocabulary.project(x_BSD, projection.weight, projection.bias)

    def set_projection(self, weight: Tensor, forward: Callable[[Tensor], Tensor]) -> None:
        projection: Any = self.skeleton.get_submodule(self.split.head)
        projection.__dict__["weight"] = weight  # not registered: the embedding trains it
        projection.forward = forward

    def loss(self, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        return self._run(hidden_BSD, labels=labels_BS).loss

    def _run(self, hidden_BSD: Tensor, **kwargs: Any) -> Any:
        self._hidden = hidden_BSD
        try:
            return self.skeleton(use_cache=False, **kwargs)
        finally:
            self._hidden = None


class DecoderHeadPart(HeadPart):
    """Part of the rows of a :class:`Head`, copied from the model. The rows of all parts are padded with zeros."""

    def __init__(
        self, source: Source, split: Split, adapters: Adapters | None, part: int, parts: int
    ) -> None:
        name = f"{split.head}.weight"
        whole = source.reference().get_parameter(name)
        tp = current_tensor_parallel()
        rows = vocabulary_rows(len(whole), tp, part, parts)
        padded_VD = padded_rows(source.rows(name, rows), rows)
        weight = nn.Parameter(padded_VD, requires_grad=whole.requires_grad and adapters is None)
        super().__init__(weight, part, tp, len(whole), name=f"skeleton.{name}")


class TiedHead:
    """Head whose weight is that of the word embedding: ``forward_fn`` of a TiedLayerSpec."""

    def __init__(self, source: Source, split: Split, vocabulary: Vocabulary) -> None:
        self._source = source
        self._split = split
        self._vocabulary = vocabulary

    @functools.cached_property
    def _head(self) -> Head:
        # Only the last stage needs it.
        return Head(self._source, self._split, None, self._vocabulary)

    def __call__(
        self, embedding: Embedding, inputs: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        return _beside_sums(functools.partial(self._project, embedding), inputs)

    def _project(self, embedding: Embedding, hidden_BSD: Tensor) -> Any:
        """Return the logits, or see :class:`Head`. The weight is looked up each time: the engine may replace it."""
        table: Any = embedding.module
        weight: Tensor = table.weight
        if embedding.tp.size > 1:
            self._vocabulary.divide(embedding.tp, table.num_embeddings)
        if self._vocabulary.chunked is not None:
            return self._vocabulary.chunked.enter(hidden_BSD, weight)
        self._head.set_projection(weight, lambda x_BSD: self._vocabulary.project(x_BSD, weight))
        return self._head(hidden_BSD)


def _beside_sums(
    project: Callable[[Tensor], Tensor], inputs: Tensor | tuple[Tensor, ...]
) -> Tensor | tuple[Tensor, ...]:
    """Apply a head to the hidden states, which may have the sums of routers beside them."""
    if isinstance(inputs, Tensor):
        return project(inputs)
    hidden_BSD, sums = inputs
    return project(hidden_BSD), sums


class Outputs:
    """Outputs of a backbone: the last hidden states and logits of routers. Everything else is None."""

    def __init__(self, hidden_BSD: Tensor | None, router_logits: tuple[Tensor, ...] | None) -> None:
        self.last_hidden_state, self.router_logits = hidden_BSD, router_logits

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


def _rotary_of_sample(
    forward: Callable[..., tuple[Tensor, ...]], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Return cosines and sines of "longrope" for a slice, which depend on the last position of the sample."""
    current = current_slice()
    if current is None:
        return forward(x, position_ids, *args, **kwargs)
    last = position_ids.new_full((*position_ids.shape[:-1], 1), current.total - 1)
    tables = forward(x, torch.cat((position_ids, last), -1), *args, **kwargs)
    return tuple([table[..., :-1, :] for table in tables])


def shards_tried(source: Source) -> set[str]:
    """Return the kinds of decoder layers whose shards were tried."""
    return _TRIED.setdefault(source, set())


_TRIED: WeakKeyDictionary[Source, set[str]] = WeakKeyDictionary()


def _slice_cache(owner: object) -> SliceCache | None:
    from .slices import SliceCache  # needs transformers

    return None if current_slice() is None else SliceCache(slice_start(), owner)


def _cut_shared(tensor: Tensor, layout: Shared, start: int, stop: int) -> Tensor:
    if not tensor.numel():
        if start == 0 or not layout.queries or not layout.keys:
            return tensor
        # Attention without a mask is causal, from the first key on: later slices need a mask.
        return tensor.new_ones(1, 1, stop, stop).tril()[:, :, start:]
    for dim in layout.queries:
        tensor = tensor.narrow(dim, start, stop - start)
    for dim in layout.keys:
        tensor = tensor.narrow(dim, 0, stop)
    return tensor


def _drop_weights(
    model: nn.Module, except_in: Sequence[nn.Module]
) -> list[tuple[nn.Module, str, torch.Size]]:
    """Remove the parameters of ``model`` except those of some modules. Returns (module, name, shape) of each."""
    kept = {id(module) for part in except_in for module in part.modules()}
    dropped = []
    for module in model.modules():
        if id(module) not in kept:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = None
                    dropped.append((module, key, parameter.shape))
    return dropped
