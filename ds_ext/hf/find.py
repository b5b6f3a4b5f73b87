"""Places at which a decoder can be cut into pipeline layers, found by running the model's own forward.

A backbone is the module that owns the list of decoder layers. Its forward embeds positions, builds masks and rotary
embeddings, calls the decoder layers and applies the final norm. :func:`find_cut` runs this forward twice, on a skeleton
whose weights take no memory and whose decoder layers only record their arguments: with a padding mask and without. The
records show which arguments every decoder layer gets. They also show what a cut would lose, such as a state that the
layers exchange; that model is refused.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import ConfigError
from .cut import Cut
from .trial import Trial, merge_records
from .weights import Source


def find_cut(source: Source) -> Cut:
    """Return how the model of ``source`` is cut.

    Raises:
        ConfigError: the model cannot be cut; the message says why.
    """
    config = source.config
    name = type(config).__name__
    _check_config(config, name)
    model = source.skeleton()
    owner, attribute = _owner_of_layers(model, config, name)
    backbone = model.get_submodule(owner)
    embedding = _name_of(model, model.get_input_embeddings())
    head = _name_of(model, model.get_output_embeddings())
    if embedding is None or head is None:
        raise ConfigError(
            f"{name}: cannot be cut, because it has no separate word embedding and output projection."
        )
    reference = source.reference()
    projection = reference.get_submodule(head)
    tied = projection.weight is reference.get_submodule(embedding).weight
    if tied and (type(projection) is not nn.Linear or projection.bias is not None):
        raise ConfigError(
            f"{name}: cannot be cut, because its tied output projection has more than the tied weight."
        )
    layers = f"{owner}.{attribute}" if owner else attribute
    trial = Trial(model, backbone, getattr(backbone, attribute), name)
    padded, plain = trial.run(padded=True), trial.run(padded=False)
    before, after = trial.modules_around(owner, layers, embedding)
    _check_sharing(reference, layers, (embedding, head), name)
    covered = (embedding, head, *before, *after, layers)
    others = [
        n for n, _ in model.named_parameters() if not n.startswith(tuple(f"{path}." for path in covered))
    ]
    if others:
        raise ConfigError(
            f"{name}: cannot be cut, because it uses {others[0]} outside its embedding, layers and head."
        )
    trial.check_tail(before)
    calls, differentiable = merge_records(padded, plain, name)
    return Cut(
        backbone=owner,
        width=model.get_submodule(embedding).weight.shape[1],
        layers=layers,
        embedding=embedding,
        head=head,
        before=before,
        after=after,
        tied=tied,
        tuple_size=trial.tuple_size,
        calls=tuple(calls),
        differentiable=tuple(differentiable),
    )


def _check_config(config: Any, name: str) -> None:
    """Raise ConfigError for models that are not plain decoders, and for options that a cut would change."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{name}: cannot be cut, because it is an encoder-decoder. Use a decoder-only model."
        )
    parts = [key for key in ("vision_config", "audio_config") if getattr(config, key, None) is not None]
    if parts:
        raise ConfigError(
            f"{name}: cannot be cut, because it is not a text model (got {parts[0]}). Pass its decoder."
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            "output_router_logits: a pipeline does not add the router's loss (got true). Set it to false in the config."
        )
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    parts = [
        rope,
        *(part for part in rope.values() if isinstance(part, dict)),
    ]  # or one for each kind of attention
    if any(part.get("rope_type") == "dynamic" for part in parts):
        raise ConfigError(
            'rope_parameters: the tables of "dynamic" depend on the lengths of all earlier samples of a rank (got '
            f"{rope}). Use a model with another rope_type."
        )
    if getattr(config, "layerdrop", 0.0):
        raise ConfigError(
            f"layerdrop: a pipeline runs every layer (got {config.layerdrop}). Set it to 0 in the config."
        )


def _owner_of_layers(model: nn.Module, config: Any, name: str) -> tuple[str, str]:
    """Return (path of the backbone, name of its list of decoder layers)."""
    count = config.get_text_config().num_hidden_layers
    lists = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and count > 0
    ]
    depth = min((path.count(".") for path in lists), default=0)
    lists = [path for path in lists if path.count(".") == depth]
    if len(lists) != 1:
        raise ConfigError(
            f"{name}: cannot be cut, because it needs one list of {count} decoder layers (got "
            f"{', '.join(lists) or 'none'})."
        )
    owner, _, attribute = lists[0].rpartition(".")
    return owner, attribute


def _check_sharing(model: nn.Module, layers: str, table: tuple[str, str], name: str) -> None:
    """Raise ConfigError if parts of the model share a parameter, apart from a head that is tied to the embedding."""
    parts: dict[int, set[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        depth = layers.count(".") + 2 if path.startswith(f"{layers}.") else layers.count(".") + 1
        part = (
            "table"
            if path.startswith(tuple(f"{end}." for end in table))
            else ".".join(path.split(".")[:depth])
        )
        parts.setdefault(id(parameter), set()).add(part)
        if len(parts[id(parameter)]) > 1:
            raise ConfigError(
                f"{name}: cannot be cut, because {' and '.join(sorted(parts[id(parameter)]))} share weights."
            )


def _name_of(model: nn.Module, module: Any) -> str | None:
    return next((path for path, other in model.named_modules() if other is module), None)
