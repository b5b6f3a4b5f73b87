"""Trial of a decoder layer: its shards compute what the whole layer does, forward and backward.

Plans of transformers are written for inference of some classes, and the code around a projection may read sizes of the
whole layer. So the first layer of each kind runs twice on a few random tokens while it is built: whole, before it is
divided, and as shards on all ranks of the group.

B: batch, S: sequence, D: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..tensor_parallel import TensorParallel, shard_dim
from .split import Split

_BATCH, _LENGTH = 2, 6
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}  # of a result's norm
_TOLERANCE = 0.05  # in half precision, whose sums are rounded in another order
Run = Callable[[Tensor], Tensor]
Results = dict[str, Tensor]


class ShardTrial:
    """Results of a whole layer, with which those of its shards are compared.

    Args:
        run: function of hidden states; returns those of the layer.
    """

    def __init__(self, split: Split, path: str, layer: nn.Module, run: Run) -> None:
        self._split, self._path, self._layer, self._run = split, path, layer, run
        self._whole = self._results()

    def check(self, tp: TensorParallel) -> None:
        """Raise ConfigError if the shards, which have replaced the whole layer, compute something else."""
        try:
            shards = self._results()
        except RuntimeError as error:  # of shapes
            raise self._refusal(tp, "fail", str(error).splitlines()[0]) from error
        parameters = dict(self._layer.named_parameters())
        for name, whole in self._whole.items():
            parameter = parameters.get(name)
            dim = None if parameter is None else shard_dim(parameter)
            expected = whole if dim is None else tp.shard(whole, dim)
            error = float((shards[name].double() - expected.double()).norm())
            scale = float(whole.double().norm())
            if not error <= _TOLERANCES.get(whole.dtype, _TOLERANCE) * max(scale, 1e-6):
                place = name if parameter is None else f"the gradient of {name}"
                norms = f"a difference of norm {error:.3g}, whole {scale:.3g}"
                raise self._refusal(tp, f"compute another value of {place}", norms)

    def _refusal(self, tp: TensorParallel, problem: str, got: str) -> ConfigError:
        return ConfigError(
            f"tensor_parallel_size: {self._split.name} cannot be divided into {tp.size} shards by its plan in "
            f"transformers, because those of {self._path} {problem} (got {got}). Use tensor_parallel_size 1 and more "
            f"pipeline stages."
        )

    def _results(self) -> Results:
        """Return output, gradient of the input, and gradients of the parameters by name."""
        weight = next(p for p in self._layer.parameters() if p.is_floating_point())
        generator = torch.Generator().manual_seed(0)
        shape = (_BATCH, _LENGTH, self._split.width)
        inputs_BSD, weights_BSD = (
            torch.randn(shape, generator=generator).to(weight.device, weight.dtype) for _ in range(2)
        )
        inputs_BSD.requires_grad_()
        with _evaluating(self._layer), torch.enable_grad():
            outputs_BSD = self._run(inputs_BSD)
            trained = {name: p for name, p in self._layer.named_parameters() if p.requires_grad}
            gradients = torch.autograd.grad(
                (outputs_BSD * weights_BSD).sum(), [inputs_BSD, *trained.values()], allow_unused=True
            )
        found = zip(("gradient of the input", *trained), gradients, strict=True)
        return {"output": outputs_BSD.detach()} | {name: g for name, g in found if g is not None}


@contextmanager
def _evaluating(layer: nn.Module) -> Any:
    """Context without dropout."""
    modes = [(module, module.training) for module in layer.modules()]
    layer.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
