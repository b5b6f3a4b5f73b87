"""The tick rule and its schedules: exact makespans and activations."""

from __future__ import annotations

import pytest

from ds_ext.pipe_schedules import Op, Placement, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.placement import bidirectional_linear, bidirectional_v, linear, v
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.pipe_schedules.tick_rule import ticks, whole_order

FAMILY = [
    *((linear(d)) for d in (1, 2, 5, 8)),
    *((v(d)) for d in (1, 2, 5, 8)),
    *((bidirectional_linear(d)) for d in (2, 4, 6, 8)),
    *((bidirectional_v(d, waves)) for d in (2, 4, 6, 8) for waves in (1, 2, 3)),
]


@pytest.mark.parametrize("placement", FAMILY, ids=lambda p: f"{p.replicas}x{p.stages}on{p.num_devices}")
def test_a_device_has_one_op_a_slot_and_units_tile(placement: Placement) -> None:
    """The proofs of tick_rule.py: no shared ticks, and no gaps after the 2n - 2 empty ticks of the first unit."""
    units = 4
    n, unit = placement.num_devices // placement.replicas, 2 * placement.stages
    for rank in range(placement.num_devices):
        taken = [slot for slot, _ in ticks(rank, placement, units * placement.num_devices)]
        assert len(set(taken)) == len(taken) == units * unit
        assert set(range(2 * n - 2, units * unit)) <= set(taken)
        assert max(taken) < units * unit + 2 * n - 2
        before_first_backward = min(
            slot for slot, op in ticks(rank, placement, placement.num_devices) if op.kind == "B"
        )
        assert len(set(range(before_first_backward)) - set(taken)) == n - 1


@pytest.mark.parametrize("ranks", range(2, 17, 2))
@pytest.mark.parametrize("units", [1, 2, 3])
def test_bitpipe_of_the_paper_is_the_slot_rule(ranks: int, units: int) -> None:
    made = timetable("bitpipe", ranks, units * ranks)
    assert made.orders == orders(made.placement, units * ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_1f1b_is_the_slot_rule(ranks: int) -> None:
    for n in range(1, 3 * ranks):
        assert timetable("1f1b", ranks, n).orders == orders(linear(ranks), n)


def orders(placement: Placement, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    return tuple(tuple(whole_order(rank, placement, micro_batches)) for rank in range(placement.num_devices))


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_chimera_time_and_memory(ranks: int, units: int) -> None:
    n = ranks * units
    simulation = simulate(timetable("chimera", ranks, n))
    assert simulation.makespan == 3 * n + (units + 1) * (ranks - 2)
    assert simulation.peak_activations == tuple(ranks // 2 + 1 + min(r, ranks - 1 - r) for r in range(ranks))
    assert simulation.messages == n * 2 * (ranks - 1)


RATIOS = [Costs(), Costs(1, 1.2, 0.8), Costs(1, 0.5, 1.5), Costs(2, 1, 1), Costs(1, 1, 2), Costs(1, 2, 0.5)]


@pytest.mark.parametrize("costs", RATIOS, ids=lambda c: f"{c.forward}-{c.backward_input}-{c.backward_weight}")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_zb_h1_time_and_memory(ranks: int, costs: Costs) -> None:
    """N >= D."""
    for n in (ranks, ranks + 1, 2 * ranks, 3 * ranks + 1, 4 * ranks):
        simulation = simulate(timetable("zb_h1", ranks, n), costs)
        expected = n * (costs.forward + costs.backward_input + costs.backward_weight) + (ranks - 1) * max(
            costs.forward, costs.forward + costs.backward_input - costs.backward_weight
        )
        assert simulation.makespan == pytest.approx(expected, rel=1e-12)
        assert simulation.peak_activations == (ranks,) * ranks
        assert simulation.messages == n * 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_zb_v_time_and_memory(ranks: int, units: int) -> None:
    n = ranks * units
    simulation = simulate(timetable("zb_v", ranks, n))
    assert simulation.makespan == 3 * n + (ranks - 1) / 2
    assert max(simulation.peak_activations) == ranks
    assert simulation.messages == n * 2 * (2 * ranks - 2)


@pytest.mark.parametrize("ranks", [4, 6, 8, 12, 16])
@pytest.mark.parametrize("units", [1, 2, 4, 8])
def test_a_message_delays_bitpipe_zb_at_its_ends_alone(ranks: int, units: int) -> None:
    # The way through the devices in front of the first backward, not one more message for every micro-batch.
    made = timetable("bitpipe_zb", ranks, ranks * units)
    assert simulate(made).makespan == 3 * ranks * units + (ranks - 2) / 4
    late = simulate(made, Costs(comm=0.01)).makespan - simulate(made).makespan
    assert late == pytest.approx(0.01 * (2.5 * ranks - 3), rel=1e-6)


@pytest.mark.parametrize("ranks", [4, 6, 8, 12, 16])
@pytest.mark.parametrize("units", [1, 2, 4, 8])
def test_bitpipe_zb_meets_the_bound_of_its_placement(ranks: int, units: int) -> None:
    n = ranks * units
    simulation = simulate(timetable("bitpipe_zb", ranks, n))
    assert simulation.makespan == 3 * n + (ranks - 2) / 4
    assert max(simulation.peak_activations) == ranks
    assert simulation.messages == n * 2 * (2 * ranks - 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("waves", [2, 3])
def test_bitpipe_zb_with_more_waves(ranks: int, waves: int) -> None:
    for n in (ranks, 3 * ranks):
        simulation = simulate(timetable("bitpipe_zb", ranks, n, waves=waves))
        assert simulation.makespan == pytest.approx(3 * n + (ranks / 2 - 1) / (2 * waves), rel=1e-12)
        assert max(simulation.peak_activations) <= ranks + 1e-9
        assert simulation.timetable.placement.stages == 2 * waves * ranks
        assert simulation.messages == waves * n * 2 * (2 * ranks - 2)


@pytest.mark.parametrize("costs", RATIOS, ids=lambda c: f"{c.forward}-{c.backward_input}-{c.backward_weight}")
@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "bitpipe_zb"])
def test_memory_is_at_most_d_for_any_size(name: str, costs: Costs) -> None:
    for ranks in (2, 4, 6):
        for units in (1, 2, 3):
            assert max(simulate(timetable(name, ranks, units * ranks), costs).peak_activations) == ranks
    for n in range(1, 9):
        assert max(simulate(timetable("zb_h1", 4, n), costs).peak_activations) == min(4, n)


def test_waves_are_longer_walks_over_the_same_devices() -> None:
    assert bidirectional_v(4, waves=1) == bidirectional_v(4)
    assert bidirectional_v(2, waves=2).pipes == ((0, 1, 1, 0, 0, 1, 1, 0), (1, 0, 0, 1, 1, 0, 0, 1))
    assert bidirectional_v(4, waves=2).replica_groups == ((0, 3), (1, 2))
    assert v(3).pipes == ((0, 1, 2, 2, 1, 0),)
    assert bidirectional_linear(4).replica_groups == ((0, 3), (1, 2))
    assert bidirectional_linear(4).stages_of(1) == (1, 2)
