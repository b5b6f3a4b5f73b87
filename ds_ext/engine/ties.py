"""Tied layers: what several places of the model share must be all that they train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import TiedLayerSpec

from ..errors import ConfigError


def require_whole_ties(module: Any) -> None:
    """Refuse a tied layer that trains more than its tied weights; a collective call of all ranks.

    DeepSpeed sums the gradients of ``tied_weight_attr`` only. Where two places are on two ranks, what else they train
    becomes two different parameters; where they are on one rank (a V placement) it is one parameter. Such a model
    would depend on the schedule, and a checkpoint, which keeps a tied layer once, would lose one of the two.

    Args:
        module: a PipelineModule whose layers are built, not yet indexed.

    Raises:
        ConfigError: names the tie and the parameters. On every rank.
    """
    places: dict[str, list[TiedLayerSpec]] = {}
    for spec in module._layer_specs:
        if isinstance(spec, TiedLayerSpec):
            places.setdefault(spec.key, []).append(spec)
    several = {key: specs for key, specs in places.items() if len(specs) > 1}
    if not several:
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, next(_faults(module, several), None))
    fault = next((fault for fault in found if fault is not None), None)
    if fault is not None:
        raise ConfigError(fault)


def _faults(module: Any, several: dict[str, list[TiedLayerSpec]]) -> Iterator[str]:
    """What is wrong with the tied layers that this rank holds."""
    for key, specs in several.items():
        if key not in module.tied_modules:
            continue
        layer = module.tied_modules[key]
        # A weight that one place does not name is not tied.
        named = set.intersection(*(set(spec.tied_weight_attr) for spec in specs))
        known = dict(layer.named_parameters(remove_duplicate=False))
        unknown = sorted(named - known.keys())
        if unknown:
            yield (
                f"tied_weight_attr of the tied layer {key!r} names {', '.join(unknown)}, and {type(layer).__name__} "
                f"has the parameters {', '.join(known) or '(none)'}."
            )
        tied = {id(known[name]) for name in named & known.keys()}
        free = [name for name, p in layer.named_parameters() if p.requires_grad and id(p) not in tied]
        if free:
            every = [name for name, p in layer.named_parameters() if p.requires_grad or id(p) in tied]
            yield (
                f"the tied layer {key!r} ({type(layer).__name__}) trains {', '.join(free)} besides its tied weights, "
                f"so its {len(specs)} places would share it under some schedules only. Tie all of it with "
                f"tied_weight_attr={every} in each TiedLayerSpec, build the layer without it (nn.Linear: bias=False), "
                f"or move it into a layer of its own."
            )
