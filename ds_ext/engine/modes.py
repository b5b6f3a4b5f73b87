"""Train and evaluation modes of the layers: those that the script sets, kept in steps and evaluations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .module import PipelineModule

logger = logging.getLogger(__name__)


@contextmanager
def training(module: PipelineModule) -> Iterator[None]:
    """Context of a training step, in which modules have the modes that the script set."""
    module.undo_eval()
    module.keeps_modes = True
    try:
        yield
    finally:
        module.keeps_modes = False


def set_first_modes(module: PipelineModule) -> None:
    """Set the modes at the start: train mode, except of parts in evaluation mode without trained parameters.

    DeepSpeed sets all modules to train mode in every step, and scripts pass layers of ``from_pretrained``, which
    returns them in evaluation mode. A part is the largest module in evaluation mode.
    """
    kept = []

    def set_modes(part: nn.Module, path: str) -> None:
        parameters = list(part.parameters())
        if part.training and part is not module and type(part).train is not nn.Module.train:
            part.train()  # a layer that keeps parts of itself in evaluation mode
        elif part.training:
            for name, child in part.named_children():
                set_modes(child, f"{path}.{name}".lstrip("."))
        elif parameters and not any(parameter.requires_grad for parameter in parameters):
            kept.append(f"{path} ({type(part).__name__})")
        else:
            part.train()

    module.undo_eval()
    set_modes(module, "")
    if kept and module.data_index == 0:
        text = "%s: in evaluation mode and frozen; this mode is kept. For dropout there, call its train()."
        logger.warning(text, ", ".join(kept))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context with every module in evaluation mode. Afterwards each has its own mode again, which users may set."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training
