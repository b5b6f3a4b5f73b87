"""Auxiliary losses of the routers of a decoder with experts.

That of transformers, with ``output_router_logits``, is pooled: counts and probabilities are summed over all decoder
layers before they are multiplied, so no stage can compute its part. Every decoder layer adds its sums to a vector that
travels with the hidden states, and the loss function multiplies them. Megatron's losses are sums over layers.

E: experts, K: experts of a token, N: tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigError

AUXILIARY_LOSS = "aux_loss"  # name of the term, in transformers too

AuxiliaryLoss = Literal["pooled", "per_layer"]


@dataclass(frozen=True)
class Routers:
    """Routers of a model.

    Attributes:
        experts: number of experts.
        chosen: experts of a token.
        coefficient: factor of the loss.
        recorder: ``OutputRecorder`` of transformers: class of the routers, and place of the logits in their outputs.
    """

    auxiliary_loss: ClassVar[AuxiliaryLoss] = "pooled"

    experts: int
    chosen: int
    coefficient: float
    recorder: Any

    def zeros(self, device: torch.device | None = None) -> Tensor:
        """Return the sums before the first layer: probabilities and tokens of each expert, and tokens, (2E + 1)."""
        return torch.zeros(2 * self.experts + 1, device=device)

    def add(self, sums: Tensor, logits_NE: Tensor, mask_N: Tensor | None) -> Tensor:
        """Return the sums with those of one layer; ``mask_N`` is False for padding."""
        probabilities_NE = logits_NE.softmax(-1)
        chosen_NK = probabilities_NE.topk(self.chosen).indices
        weights_N = (
            torch.ones(len(logits_NE), device=sums.device) if mask_N is None else mask_N.to(sums.dtype)
        )
        tokens_E = sums.new_zeros(self.experts).index_add_(
            0, chosen_NK.flatten(), weights_N.repeat_interleave(self.chosen)
        )
        totals_E = weights_N @ probabilities_NE.float()
        return sums + torch.cat((totals_E, tokens_E, weights_N.sum()[None]))

    def loss(self, sums: Tensor) -> Tensor:
        """Return the loss of the sums of all layers, times its coefficient."""
        totals_E, tokens_E = sums[: self.experts], sums[self.experts : -1].detach()
        tokens = sums[-1].detach().clamp_min(1)  # of a sample that is only padding
        return self.coefficient * self.experts * (totals_E / tokens) @ (tokens_E / tokens)

    @contextmanager
    def recording(self, layer: nn.Module) -> Iterator[list[Tensor]]:
        """Context that yields the logits of the routers in a decoder layer, after they ran."""
        logits: list[Tensor] = []
        kind, place, name = self.recorder.target_class, self.recorder.index, self.recorder.layer_name or ""

        def record(module: nn.Module, args: Any, output: Any) -> None:
            value = output[place] if isinstance(output, tuple) else output
            logits.append(value.reshape(-1, self.experts))

        routers = [m for path, m in layer.named_modules() if isinstance(m, kind) and name in path]
        handles = [router.register_forward_hook(record) for router in routers]
        try:
            yield logits
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True)
class LayerRouters(Routers):
    """Routers whose losses are sums over layers, as in Megatron.

    Attributes:
        z_coefficient: factor of the mean square of the logarithm of the sum of the exponentials of the logits
            (arXiv 2202.08906, section 3).
    """

    auxiliary_loss = "per_layer"

    z_coefficient: float = 0.0

    def zeros(self, device: torch.device | None = None) -> Tensor:
        """Return the loss before the first layer."""
        return torch.zeros(1, device=device)

    def add(self, sums: Tensor, logits_NE: Tensor, mask_N: Tensor | None) -> Tensor:
        layer = super().add(super().zeros(sums.device), logits_NE.float(), mask_N)
        weights_N = torch.ones_like(logits_NE[:, 0]) if mask_N is None else mask_N.to(logits_NE.dtype)
        squares_N = logits_NE.float().logsumexp(-1).square()
        z = self.z_coefficient * (squares_N @ weights_N.float()) / layer[-1].detach().clamp_min(1)
        return sums + super().loss(layer) / self.chosen + z

    def loss(self, sums: Tensor) -> Tensor:
        return sums.squeeze(0)


def routers_of(auxiliary_loss: AuxiliaryLoss, z_loss: float) -> Callable[[int, int, float, Any], Routers]:
    """Return the class of routers with a loss. Raises ConfigError for a z-loss that is pooled."""
    if auxiliary_loss == "per_layer":
        return functools.partial(LayerRouters, z_coefficient=z_loss)
    if z_loss:
        raise ConfigError(f"z_loss: needs auxiliary_loss 'per_layer' (got {z_loss:g} and 'pooled'). Set it.")
    return Routers


def find_routers(model: Any, backbone: Any) -> Routers | None:
    """Return the routers of a model whose config adds their loss; None without it. Raises ConfigError for others."""
    config = model.config
    if not getattr(config, "output_router_logits", False):
        return None
    from transformers.utils.output_capturing import OutputRecorder

    recorder = (getattr(backbone, "_can_record_outputs", None) or {}).get("router_logits")
    if isinstance(recorder, type):
        recorder = OutputRecorder(recorder)
    keys = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    values: list[Any] = [getattr(model, key, None) for key in keys]
    if not isinstance(recorder, OutputRecorder) or None in values:
        raise ConfigError(
            f"output_router_logits: the router's loss of {type(config).__name__} is not supported (got true). Set it "
            "to false in config.json, in a copy of the model's folder."
        )
    experts, chosen, coefficient = values
    return Routers(experts, chosen, coefficient, recorder)
