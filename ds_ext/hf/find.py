"""Places at which a decoder can be cut into pipeline layers, found by running the model's own forward.

A backbone is the module that owns the list of decoder layers. Its forward embeds positions, builds masks and rotary
embeddings, calls the decoder layers and applies the final norm. :func:`find_split` runs this forward twice, with a
padding mask and without, on a skeleton whose weights take no memory and whose decoder layers only record their
arguments. The records show which arguments every decoder layer gets. They also show what a cut would lose, such as a
state that the layers exchange; that model is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import ConfigError
from .routers import find_routers
from .shards import plan_of
from .split import Calls, NotSplittable, Split, leaves_of
from .trial import Trial, merge_records
from .weights import Source


def find_split(source: Source) -> Split:
    config = source.config
    name = type(config).__name__
    _check_config(config, name)
    model = source.skeleton()
    owner, attribute = _owner_of_layers(model, config, name)
    layers = f"{owner}.{attribute}" if owner else attribute
    embedding, head = _embedding_and_head(model, name)
    reference = source.reference()
    tied = _is_head_tied(reference, embedding, head, name)
    backbone = model.get_submodule(owner)
    routers = find_routers(model, backbone)
    trial = Trial(model, backbone, getattr(backbone, attribute), name)
    with _refusing(name):
        records = trial.run(padded=True), trial.run(padded=False)
    before, after = trial.modules_around(owner, layers, embedding)
    _check_sharing(reference, layers, (embedding, head), name)
    _check_coverage(model, (embedding, head, *before, *after, layers), name)
    tuple_size = trial.tuple_size
    sliced = _sliced_calls(trial) if routers is None else "the loss of its routers needs all tokens"
    with _refusing(name):
        trial.tuple_size = tuple_size
        trial.check_tail(before)
        whole = merge_records(*records)
    return Split(
        name=name,
        backbone=owner,
        width=model.get_submodule(embedding).weight.shape[1],
        layers=layers,
        embedding=embedding,
        head=head,
        before=before,
        after=after,
        tied=tied,
        tuple_size=tuple_size,
        whole=whole,
        sliced=sliced,
        plan=plan_of(model, name),
        routers=routers,
    )


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    try:
        yield
    except NotSplittable as error:
        raise ConfigError(f"{name}: cannot be cut, because {error}.") from None


def _sliced_calls(trial: Trial) -> Calls | str:
    """Return the arguments for slices; or the reason why the model cannot train in them."""
    from .slices import SliceCache  # needs transformers

    config, tuple_size = trial.model.config.get_text_config(), trial.tuple_size
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "its attention is bidirectional"
    try:
        padded, plain = (trial.run(padded, in_slices=True) for padded in (True, False))
        for index, record in enumerate(padded):
            if not any(isinstance(leaf, SliceCache) for leaf in leaves_of(record)[0]):
                return f"decoder layer {index} does not get the cache of keys and values"
        calls = merge_records(padded, plain)
    except NotSplittable as error:
        return str(error)
    return calls if trial.tuple_size == tuple_size else "its layers return something else with a cache"


def _check_config(config: Any, name: str) -> None:
    """Raise ConfigError for models that are not plain decoders, and for options that a cut would change."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{name}: cannot be cut, because it is an encoder-decoder. Use a decoder-only model."
        )
    for key in ("vision_config", "audio_config"):
        if getattr(config, key, None) is not None:
            raise ConfigError(
                f"{name}: cannot be cut, because it is not a text model (got {key}). Pass its decoder."
            )
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # Models with several kinds of attention have an object for each of them.
    settings = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if any(setting.get("rope_type") == "dynamic" for setting in settings):
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


def _embedding_and_head(model: Any, name: str) -> tuple[str, str]:
    embedding = _path_of(model, model.get_input_embeddings())
    head = _path_of(model, model.get_output_embeddings())
    if embedding is None or head is None:
        raise ConfigError(
            f"{name}: cannot be cut, because it has no separate word embedding and output projection."
        )
    return embedding, head


def _is_head_tied(model: nn.Module, embedding: str, head: str, name: str) -> bool:
    projection = model.get_submodule(head)
    if projection.weight is not model.get_submodule(embedding).weight:
        return False
    if type(projection) is not nn.Linear or projection.bias is not None:
        raise ConfigError(
            f"{name}: cannot be cut, because its tied output projection has more than the tied weight."
        )
    return True


def _check_coverage(model: nn.Module, paths: Sequence[str], name: str) -> None:
    prefixes = tuple(f"{path}." for path in paths)
    for parameter_name, _ in model.named_parameters():
        if not parameter_name.startswith(prefixes):
            raise ConfigError(
                f"{name}: cannot be cut, because it uses {parameter_name} outside its embedding, layers and head."
            )


def _check_sharing(model: nn.Module, layers: str, table: tuple[str, str], name: str) -> None:
    """Raise ConfigError if parts of the model share a parameter.

    The parts are every decoder layer, every other module beside the list ``layers``, and the modules of ``table``
    (embedding and head) together.
    """
    depth = layers.count(".") + 1  # words in the path of a module beside the list
    table_prefixes = tuple(f"{path}." for path in table)

    def part_of(path: str) -> str:
        if path.startswith(table_prefixes):
            return "table"
        words = path.split(".")
        return ".".join(words[: depth + 1] if path.startswith(f"{layers}.") else words[:depth])

    parts: dict[int, set[str]] = {}  # id of a parameter -> parts that have it
    for path, parameter in model.named_parameters(remove_duplicate=False):
        owners = parts.setdefault(id(parameter), set())
        owners.add(part_of(path))
        if len(owners) > 1:
            raise ConfigError(f"{name}: cannot be cut, because {' and '.join(sorted(owners))} share weights.")


def _path_of(model: nn.Module, module: Any) -> str | None:
    return next((path for path, candidate in model.named_modules() if candidate is module), None)
