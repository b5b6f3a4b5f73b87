"""The yardstick of every parity test: the same model trained by a plain PyTorch loop, without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from ds_ext.recipes.models.gpt import GPTConfig, gpt_layer_specs, gpt_loss
from ds_ext.tensor_parallel import DropoutClock, TensorParallel, shard_dim
from tests.losses import learned, share, step_counts

Batch = tuple[Any, Tensor]
"""tokens_BS, or (tokens_BS, starts_BS) of a packed model, and labels_BS of one micro-batch."""


class ReferenceRun(NamedTuple):
    """What a training run leaves behind."""

    losses: list[float]
    """Mean over the counted labels, one a step, before that step's update."""
    grad_norms: list[float]
    """2-norm over the whole model, every parameter once, before clipping; one a step."""
    parameters: dict[str, Tensor]
    """By "layer index.name in the layer"; the tied embedding under its first layer."""


class Chain(nn.Module):
    """All layers of a model, one after the other; tied specs share one module."""

    def __init__(self, config: GPTConfig, tp: TensorParallel, clock: DropoutClock) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.calls: list[Callable[[Any], Any]] = []
        tied: dict[str, nn.Module] = {}
        config = dataclasses.replace(config, chunked_loss=False)  # the yardstick has whole logits
        for index, spec in enumerate(gpt_layer_specs(config, tp, clock)):
            if isinstance(spec, TiedLayerSpec) and spec.key in tied:
                module = tied[spec.key]
            else:
                module = self.layers[str(index)] = spec.build()
            if isinstance(spec, TiedLayerSpec):
                tied[spec.key] = module
                if spec.forward_fn is not None:
                    self.calls.append(partial(spec.forward_fn, module))
                    continue
            self.calls.append(module)

    def forward(self, x: Any) -> Any:
        for call in self.calls:
            x = call(x)
        return x

    def parameters_by_layer(self) -> dict[str, nn.Parameter]:
        """Parameters by "layer index.name in the layer"."""
        return {name.removeprefix("layers."): p for name, p in self.named_parameters()}


def random_batches(
    config: GPTConfig, steps: int, micro_batches: int, micro_batch_size: int = 2, seed: int = 7
) -> list[list[Batch]]:
    """``batches[step][micro_batch]`` of random token ids, each sample with its next tokens as labels.

    Low ids are frequent, and every step shifts the samples of the first one, so that models learn from the first step
    on. A packed model gets samples of random documents.
    """
    generator = torch.Generator().manual_seed(seed)

    shape = (micro_batches, micro_batch_size, config.seq_length + 1)
    ids_MBS = (config.vocab_size * torch.rand(shape, generator=generator, dtype=torch.float32) ** 3).long()

    def batch(ids: Tensor) -> Batch:
        tokens_BS, labels_BS = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        if not config.packed:
            return tokens_BS, labels_BS
        # Of its document. The numbers do not depend on the default dtype.
        first_BS = torch.rand(tokens_BS.shape, generator=generator, dtype=torch.float32) < 0.2
        starts_BS = (first_BS * torch.arange(config.seq_length)).cummax(1).values
        return (tokens_BS, starts_BS), labels_BS

    return [[batch(ids) for ids in ids_MBS.roll(step, 2)] for step in range(steps)]


def train_reference(
    config: GPTConfig,
    batches: Sequence[Sequence[Batch]],
    steps: int,
    lr: float,
    *,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    no_decay: Callable[[nn.Parameter], bool] = lambda parameter: False,
    clip: float | None = 1.0,
    dropout: bool = True,
    tp: TensorParallel | None = None,
    dtype: torch.dtype = torch.float32,
) -> ReferenceRun:
    """Train for ``steps`` steps, the micro-batches of a step one after the other.

    All counted labels of a step weigh the same.

    Args:
        batches: ``batches[step][micro_batch]``; step t uses entry t modulo the length.
        no_decay: tells the parameters that are not to decay.
        clip: largest 2-norm of the gradient; None only measures it.
        dropout: False sets both dropout probabilities of ``config`` to zero.
        tp: a tensor-parallel group to run in, for parity at an equal size with dropout; the plain single
            process when None. The parameters of the result are full ones either way.
    """
    if not dropout:
        config = dataclasses.replace(config, hidden_dropout=0.0, attention_dropout=0.0)
    tp = tp or TensorParallel()
    clock = DropoutClock()
    model = Chain(config, tp, clock).to(dtype)
    loss_fn = gpt_loss(dataclasses.replace(config, chunked_loss=False), tp)
    groups = [
        {"params": [p for p in model.parameters() if not no_decay(p)], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if no_decay(p)], "weight_decay": 0.0},
    ]
    if optimizer == "sgd":
        update: torch.optim.Optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum)
    else:
        update = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)

    losses, grad_norms = [], []
    for step in range(steps):
        micro_batches = batches[step % len(batches)]
        total, counts = 0.0, step_counts(loss_fn, [labels for _, labels in micro_batches])
        for index, (tokens_BS, labels_BS) in enumerate(micro_batches):
            clock.set(step, index)
            loss = share(loss_fn(model(tokens_BS), labels_BS), counts)
            loss.backward()
            total += loss.item()
        losses.append(total)
        grad_norms.append(_clip(list(model.parameters()), clip, tp))
        update.step()
        update.zero_grad()
    parameters = {name: gather_shards(p, shard_dim(p), tp) for name, p in model.parameters_by_layer().items()}
    return ReferenceRun(learned(losses, unless="" if lr else "no learning rate"), grad_norms, parameters)


def assert_close_gradients(
    found: Tensor | None, expected: Tensor | None, name: str = "", tolerance: float = 1e-5
) -> None:
    """Compare gradients, to a tolerance of the largest element or ten times of each. The default is for fp32.

    Kernels of other processors sum in another order: a small element of a large gradient differs by more than its
    own last bits.
    """
    assert (found is None) == (expected is None), name
    if found is not None and expected is not None:
        scale = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=tolerance * scale, msg=name)


def gather_shards(shard: Tensor, dim: int | None, tp: TensorParallel) -> Tensor:
    """The full tensor, on every rank, from each rank's shard along ``dim``; None is a replicated tensor."""
    if dim is None or tp.size == 1:
        return shard.detach()
    shards = [torch.empty_like(shard) for _ in range(tp.size)]
    dist.all_gather(shards, shard.detach().contiguous(), group=tp.group)
    return torch.cat(shards, dim)


def _clip(parameters: list[nn.Parameter], clip: float | None, tp: TensorParallel) -> float:
    limit = float("inf") if clip is None else clip
    if tp.size == 1:
        return float(nn.utils.clip_grad_norm_(parameters, limit))
    squares = torch.zeros(2)
    for p in parameters:
        assert p.grad is not None
        squares[0 if shard_dim(p) is None else 1] += p.grad.to(squares.dtype).pow(2).sum()
    dist.all_reduce(squares[1:], group=tp.group)
    norm = squares.sum().sqrt()
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)
