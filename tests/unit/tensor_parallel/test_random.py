"""Keyed random numbers depend only on their key and keep the state of the global generator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ds_ext.tensor_parallel import (
    DropoutClock,
    KeyedDropout,
    KeyedLayers,
    keyed_normal,
    keyed_rng,
    layer_key,
    mix_key,
)
from ds_ext.tensor_parallel.random import splitmix64

CPU = torch.device("cpu")
BASE = {"seed": 1, "step": 2, "micro_batch": 3, "layer": 4, "site": "mlp_output", "shard": 0}


def mask(p: float = 0.5, /, **changes: int | str) -> torch.Tensor:
    place = {**BASE, **changes}
    clock = DropoutClock(int(place["step"]), int(place["micro_batch"]))
    site, numbers = str(place["site"]), {n: int(place[n]) for n in ("seed", "layer", "shard")}
    return KeyedDropout(p, site=site, clock=clock, **numbers)(torch.ones(64, 64))


def test_splitmix64_gives_the_published_sequence() -> None:
    # The first three outputs of the authors' reference program from state 1234567.
    step = 0x9E3779B97F4A7C15
    outputs = [splitmix64(1234567 + i * step) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_depend_on_every_part_and_on_their_order() -> None:
    keys = {mix_key(a, b, name) for a in range(-2, 30) for b in range(30) for name in ("x", "y")}
    assert len(keys) == 32 * 30 * 2
    assert all(0 <= key < 1 << 64 for key in keys)


def test_a_key_is_the_same_in_every_process() -> None:
    assert mix_key("dropout", 1, 2) == 0x49CE99A4D7D6C847


@pytest.mark.parametrize(
    ("part", "other"),
    [("seed", 9), ("step", 9), ("micro_batch", 9), ("layer", 9), ("shard", 1), ("site", "attention")],
)
def test_each_part_of_the_place_gives_another_mask(part: str, other: int | str) -> None:
    kept, other_kept = mask() != 0, mask(0.5, **{part: other}) != 0
    # Independent masks agree on 2048 +- 32 of 4096 elements; a mask that ignores the part agrees on all.
    assert (kept == other_kept).sum().item() == pytest.approx(2048, abs=200)


def test_the_mask_of_a_place_is_always_the_same() -> None:
    torch.manual_seed(1)
    first = mask()
    torch.manual_seed(2)
    assert torch.equal(mask(), first)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_expected_share_and_scales_it(p: float) -> None:
    dropped = mask(p)
    assert (dropped != 0).float().mean().item() == pytest.approx(1 - p, abs=0.03)
    torch.testing.assert_close(dropped[dropped != 0], torch.full_like(dropped[dropped != 0], 1 / (1 - p)))


def test_dropout_gradient_is_the_mask() -> None:
    dropout = KeyedDropout(0.3, 1, 0, "x", DropoutClock())
    x = torch.randn(32, 8, requires_grad=True)
    y = dropout(x)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x.detach(), y.detach())


def test_no_dropout_in_evaluation_or_with_probability_zero() -> None:
    x = torch.randn(4, 4)
    clock = DropoutClock()
    assert torch.equal(KeyedDropout(0.5, 1, 0, "x", clock).eval()(x), x)
    assert torch.equal(KeyedDropout(0.0, 1, 0, "x", clock)(x), x)


def test_the_global_generator_keeps_its_state() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    mask()
    keyed_normal(1.0, 5, "w")(torch.empty(100))
    with keyed_rng(7, CPU):
        torch.rand(10)
    with pytest.raises(ZeroDivisionError), keyed_rng(7, CPU):
        raise ZeroDivisionError
    assert torch.equal(torch.rand(4), expected)


def test_keyed_rng_decides_the_dropout_inside_attention() -> None:
    q = torch.ones(1, 2, 16, 4)

    def attend(key: int) -> torch.Tensor:
        with keyed_rng(key, CPU):
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    assert torch.equal(attend(1), attend(1))
    assert not torch.equal(attend(1), attend(2))


def test_start_values_depend_on_key_and_scale() -> None:
    def draw(std: float, *key: int | str) -> torch.Tensor:
        return keyed_normal(std, *key)(torch.empty(100, 100))

    assert torch.equal(draw(1.0, 1, 0, "a"), draw(1.0, 1, 0, "a"))
    others = [draw(1.0, 2, 0, "a"), draw(1.0, 1, 1, "a"), draw(1.0, 1, 0, "b")]
    assert not any(torch.equal(draw(1.0, 1, 0, "a"), other) for other in others)
    assert draw(0.02, 1).std().item() == pytest.approx(0.02, rel=0.05)


def test_the_clock_restores_its_step_and_micro_batch() -> None:
    clock = DropoutClock()
    clock.set(5, 6)
    with pytest.raises(ZeroDivisionError), clock.at(1, 2):
        assert (clock.step, clock.micro_batch) == (1, 2)
        raise ZeroDivisionError
    assert (clock.step, clock.micro_batch) == (5, 6)


def test_layers_draw_from_their_keys_and_the_generator_stays() -> None:
    before, (seed, step, micro_batch) = torch.get_rng_state(), (2**63 + 5, 3, 4)
    drawn: list[torch.Tensor] = []

    def layer(x: int) -> int:
        drawn.append(torch.rand(3))
        return x + 1

    def fail(x: int) -> int:
        raise ZeroDivisionError

    keyed = KeyedLayers(CPU)
    place = {"seed": seed, "step": step, "micro_batch": micro_batch, "first": 300}
    assert keyed.run([layer, layer], 5, **place) == 7
    with pytest.raises(ZeroDivisionError):
        keyed.run([layer, fail], 5, **place)
    for index, numbers in zip((300, 301, 300), drawn, strict=True):
        with keyed_rng(layer_key(seed, step, micro_batch, index), CPU):
            assert torch.equal(torch.rand(3), numbers)
    assert torch.equal(torch.get_rng_state(), before)
