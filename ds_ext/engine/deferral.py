"""Report of the weight gradients that split backwards defer."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Sequence

import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as ds

from ..pipe_schedules.bridge import BackwardWeight
from ..tensor_parallel import Deferral, DeferralWatch, let_defer
from .all_ranks import on_all_ranks
from .executor import Observer
from .module import PipelineModule
from .stages.buffer import Buffer
from .wrappers import plain_name

logger = logging.getLogger(__name__)

_MIN_DEFERRED = 0.5  # share of the elements; log a warning if it is smaller
_MAX_NAMES = 4  # parameters in a log line


class DeferralReport(Observer):
    """Log of the share of weight gradients that the split backwards of the first step deferred.

    Only deferred gradients make a split backward faster. All others are computed with the input gradient. The
    constructor enables the layers of ``module`` to defer.

    Attributes:
        share: share of deferred elements; None before :meth:`finish`.
    """

    kinds = (BackwardWeight,)

    def __init__(self, module: PipelineModule, schedule: str, buffers: Sequence[Buffer]) -> None:
        self._module, self._schedule, self._buffers = module, schedule, buffers
        self.share: float | None = None
        let_defer(module)
        self._watch = DeferralWatch(module.parameters())

    def before(self, instruction: ds.PipeInstruction) -> None:
        later = self._buffers[instruction.buffer_id].deferred
        assert later is not None
        self._watch.add(later)

    def finish(self) -> None:
        """Set the share of deferred elements, and log it on rank 0. All ranks must call this together."""
        self._watch.close()
        named_parameters = (
            (f"{plain_name(name)} of layer {index} ({type(layer).__name__})", parameter)
            for stage in self._module.stages
            for index, layer in self._module.stage_modules(stage).items()
            for name, parameter in layer.named_parameters()
        )
        deferrals = on_all_ranks(lambda: self._watch.deferral(named_parameters))
        total: Deferral = functools.reduce(operator.add, deferrals)
        self.share = total.share
        if dist.get_rank() == 0:
            self._log(total)

    def _log(self, total: Deferral) -> None:
        line = "%s: deferred weight gradients: %.1f%% of the elements; not deferred: %s"
        names = ", ".join(total.largest_at_once[:_MAX_NAMES]) or "none"
        values = self._schedule, 100 * total.share, names
        if total.share >= _MIN_DEFERRED:
            logger.info(line, *values)
        else:
            fix = (
                "Use 1f1b, interleaved or bitpipe, or in these layers nn.Linear, nn.Embedding or "
                "ds_ext.tensor_parallel.linear (docs/schedules.md)."
            )
            logger.warning(f"{line}. Splitting backwards gains little. {fix}", *values)
