"""What forwards on devices of their own cost and bring, beside a plain pipeline: the honest line of ``compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..pipe_schedules import timetable
from ..pipe_schedules.simulate import Simulation, simulate

_PLAIN = "1f1b"


@dataclass(frozen=True)
class Price:
    """A simulated timetable with forward devices, against as many 1F1B pipelines as it has backward pipelines.

    Device times are in the costs' unit times devices; a merged forward device counts as the part of a device that its
    one rank is.

    Args:
        devices: of a step, with forward devices.
        backward_devices: those among them that go backward.
        makespan: with forward devices.
        plain: device time of 1F1B.
        recomputing: device time of 1F1B that computes every forward again too.
        plain_activations: that the worst device of 1F1B keeps, in micro-batches of one D-th of the model.
    """

    devices: float
    backward_devices: int
    makespan: float
    plain: float
    recomputing: float
    plain_activations: float

    @property
    def ratio(self) -> float:
        """Device time, 1F1B = 1."""
        return self.makespan * self.devices / self.plain if self.plain else 1.0

    @property
    def recomputing_ratio(self) -> float:
        """Device time, 1F1B that recomputes = 1."""
        return self.makespan * self.devices / self.recomputing if self.recomputing else 1.0

    @property
    def break_even(self) -> float:
        """What a forward device may cost at most, in backward devices, for the same price; 0: it pays at no price."""
        left = self.plain / self.makespan - self.backward_devices if self.makespan else 0.0
        return max(left / (self.devices - self.backward_devices), 0.0)


def price(simulation: Simulation) -> Price | None:
    """Of a timetable with forward devices; None for others."""
    made = simulation.timetable
    place, costs = made.placement, simulation.costs
    if place.forward is None or not made.trains:
        return None
    costs = replace(costs, links={})
    order = timetable(_PLAIN, place.width, made.micro_batches // place.replicas)
    plain, again = simulate(order, costs), simulate(order, replace(costs, b=costs.b + costs.f))
    backward = place.replicas * place.width
    return Price(
        devices=backward + place.width / place.forward.merged,
        backward_devices=backward,
        makespan=simulation.makespan,
        plain=plain.makespan * backward,
        recomputing=again.makespan * backward,
        plain_activations=max(plain.peak_activations),
    )


def notes(simulations: Sequence[Simulation]) -> list[str]:
    """A sentence for every timetable with forward devices: when it pays, and that it does not otherwise."""
    found = []
    for simulation in simulations:
        one = price(simulation)
        if one is None:
            continue
        name, kept = simulation.timetable.schedule, max(simulation.peak_activations)
        text = (
            f"{name} takes {one.devices:g} devices: {one.ratio:.2f} times the device time of {_PLAIN} for the same "
            f"micro-batches, {one.recomputing_ratio:.2f} times that of {_PLAIN} with recomputation."
        )
        worth = (
            f"where a forward device costs less than {one.break_even:.2f} of a backward device, or "
            if one.break_even
            else ""
        )
        if one.ratio > 1:
            memory = f"where {one.plain_activations:g} activations do not fit ({name} keeps {kept:g})"
            text += f" It pays only {worth}{memory}."
        found.append(text)
    return found
