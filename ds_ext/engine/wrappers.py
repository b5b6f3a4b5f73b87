"""Names of parameters and buffers without those of wrappers. Needs no torch.

``torch.compile(layer)`` and torch's wrappers for recomputation hold a layer as a submodule, whose name is part of those
of the layer's tensors. How a layer runs is no part of a model, so checkpoints, exports, state dicts and errors
have the names of the layer itself. Names of either kind load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from .types import Json, Record

if TYPE_CHECKING:
    from torch import nn

_T = TypeVar("_T")

# Of torch._dynamo.eval_frame.OptimizedModule, whose import takes seconds, and of torch's ActivationWrapper.
COMPILED, RECOMPUTED = "_orig_mod", "_checkpoint_wrapped_module"


def plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in (COMPILED, RECOMPUTED))


def plain_names(values: Mapping[str, _T]) -> dict[str, _T]:
    return {plain_name(name): value for name, value in values.items()}


def plain_manifest(manifest: Json) -> Record:
    """Return the manifest of a checkpoint with plain names; earlier versions wrote those of wrappers.

    A renamed parameter has its name in the optimizer's files as ``saved_name``.
    """
    plain = dict(manifest)
    if "parameters" in plain:
        plain["parameters"] = {
            plain_name(name): {**record, "key": plain_name(record["key"]), "saved_name": name}
            for name, record in plain["parameters"].items()
        }
    if "aliases" in plain:
        plain["aliases"] = {plain_name(place): plain_name(name) for place, name in plain["aliases"].items()}
    return plain


def let_names_be_plain(module: nn.Module) -> None:
    """Make ``state_dict()`` of a module return plain names, and ``load_state_dict()`` accept names of either kind."""
    module.register_state_dict_post_hook(_remove_wrappers)
    module.register_load_state_dict_pre_hook(_add_wrappers)


def _remove_wrappers(module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    _rename(state, prefix, plain_name)


def _add_wrappers(module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    _rename(state, prefix, plain_name)
    for path, submodule in module.named_modules(remove_duplicate=False):
        if COMPILED in submodule._modules:
            parts = [part for part in path.split(".") if part not in ("", RECOMPUTED)]
            _rename(state, prefix + "".join(f"{part}." for part in parts), f"{COMPILED}.{{}}".format)
    # A wrapper for recomputation takes plain names, and has done so already if it is the module itself.
    if RECOMPUTED in module._modules:
        _rename(state, prefix, f"{RECOMPUTED}.{{}}".format)


def _rename(state: dict[str, object], prefix: str, rename: Callable[[str], str]) -> None:
    """Rename the keys with a prefix in place and in order; ``rename`` gets a name without the prefix."""
    items = [
        (prefix + rename(key.removeprefix(prefix)) if key.startswith(prefix) else key, value)
        for key, value in state.items()
    ]
    state.clear()
    state.update(items)
