"""Trial of a decoder layer: its shards compute what the whole layer does, forward and backward.

Plans of transformers are written for inference of some classes, and the code around a projection may read sizes of the
whole layer. So the first layer of each kind runs twice on a few random tokens while it is built: whole, before it is
divided, and as shards on all ranks of the group.

B: batch, S: sequence, D: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..engine.modes import evaluating
from ..errors import ConfigError
from ..tensor_parallel import TensorParallel, shard_dim
from .split import Split

_BATCH, _LENGTH = 2, 6
# Of a result's norm. Norms of models in fp64 compute in fp32.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
_ROUNDING = 1e-3
_TOLERANCE = 0.05  # in half precision, whose sums are rounded in another order
Run = Callable[[Tensor], Tensor]
Results = dict[str, Tensor]


class ShardTrial:
    """Results of a whole layer, with which those of its shards are compared.

    Adapters that are still zero have random values until :meth:`check` is done: otherwise, nothing would depend on the
    adapters before them.

    Args:
        run: function of hidden states; returns those of the layer.
        tp: position in the group of the shards.
    """

    def __init__(self, split: Split, path: str, layer: nn.Module, run: Run, tp: TensorParallel) -> None:
        self._split, self._path, self._layer, self._run, self._tp = split, path, layer, run, tp
        generator = torch.Generator().manual_seed(0)
        self._zeros = [p for p in layer.parameters() if p.requires_grad and p.dim() == 2 and not p.any()]
        for parameter in self._zeros:
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
        self._whole = self._results()

    def check(self) -> None:
        """Raise ConfigError on all ranks of the group if the shards in place of the layer compute something else."""
        tp, problem, cause = self._tp, "", None
        try:
            problem = self._difference(self._results(), tp)
        except RuntimeError as error:  # of shapes
            problem, cause = f"fail (got {str(error).splitlines()[0]})", error
        for parameter in self._zeros:
            parameter.data.zero_()
        problems = torch.tensor(float(bool(problem)), device=self._whole["output"].device)
        dist.all_reduce(problems, group=tp.group)
        if problems:
            problem = problem or f"compute something else on {int(problems)} other ranks"
            raise ConfigError(
                f"tensor_parallel_size: {self._split.name} cannot be divided into {tp.size} shards by its plan in "
                f"transformers, because those of {self._path} {problem}. Use tensor_parallel_size 1 and more pipeline "
                f"stages."
            ) from cause

    def _difference(self, shards: Results, tp: TensorParallel) -> str:
        """Return the first result that differs, with numbers; "" if none does."""
        parameters = dict(self._layer.named_parameters())
        tolerance = max(
            _TOLERANCES.get(p.dtype, _TOLERANCE) for p in parameters.values() if p.is_floating_point()
        )
        largest = max(float(whole.double().norm()) for whole in self._whole.values())
        for name, whole in self._whole.items():
            dim = shard_dim(parameters[name]) if name in parameters else None
            expected = whole if dim is None else tp.shard(whole, dim)
            error, scale = (
                float(t.double().norm()) for t in (shards[name].double() - expected.double(), whole)
            )
            # What is zero but for rounding is compared with the largest result.
            if not error <= tolerance * max(scale, _ROUNDING * largest):
                place = f"the gradient of {name}" if name in parameters else name
                return f"compute another value of {place} (got a difference of norm {error:.3g}, whole {scale:.3g})"
        return ""

    def _results(self) -> Results:
        """Return output, gradient of the input, and gradients of the parameters by name."""
        weight = next(p for p in self._layer.parameters() if p.is_floating_point())
        generator = torch.Generator().manual_seed(0)
        length = -(-_LENGTH // self._tp.size) * self._tp.size
        shape = (_BATCH, length, self._split.width)
        inputs_BSD, weights_BSD = (
            torch.randn(shape, generator=generator).to(weight.device, weight.dtype) for _ in range(2)
        )
        inputs_BSD.requires_grad_()
        with evaluating(self._layer), torch.enable_grad():
            outputs_BSD = self._run(inputs_BSD)
            trained = {name: p for name, p in self._layer.named_parameters() if p.requires_grad}
            gradients = torch.autograd.grad(
                (outputs_BSD * weights_BSD).sum(), [inputs_BSD, *trained.values()], allow_unused=True
            )
        found = zip(("gradient of the input", *trained), gradients, strict=True)
        return {"output": outputs_BSD.detach()} | {name: g for name, g in found if g is not None}
