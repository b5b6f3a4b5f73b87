"""Loads of the experts in an engine's layers."""

from __future__ import annotations

from ..errors import ConfigError
from ..experts import ExpertLoads
from .all_ranks import on_all_ranks
from .engine_state import EngineState


def make_expert_loads(engine: EngineState) -> ExpertLoads:
    """Return the loads of the experts of this rank. All ranks call this together.

    Raises ConfigError if the JSON updates the biases of routers, but no router of the model has one, or ranks without
    optimizer run the forwards (FBD).
    """
    rate = engine.plan.settings.router_bias_update_rate
    if rate and engine.layout.placement.forward_devices:
        raise ConfigError(
            f"router_bias_update_rate: forward ranks count no tokens (got {rate:g} with {engine.plan.schedule.name}). "
            f"Use another schedule."
        ).of_all_ranks()
    loads = ExpertLoads(engine.module, rate, engine.mpu.get_data_parallel_group())
    if rate and not any(on_all_ranks(lambda: len(loads.biased))):
        raise ConfigError(
            f"router_bias_update_rate: no router of the model has a bias (got {rate:g}). Remove it, or use a model "
            f"such as DeepSeek-V3 or GLM-4.5."
        ).of_all_ranks()
    return loads
