"""Transport between GPUs: the parts that need no GPU and no other ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ds_ext.cli import doctor
from ds_ext.comm import _native
from ds_ext.comm.cuda import trial as cuda_trial
from ds_ext.comm.cuda.slabs import SlabAllocator, slot_bytes
from ds_ext.comm.endpoints import both_ways


def test_slots_do_not_overlap_and_wait_for_their_last_release() -> None:
    draw, allocator = random.Random(0), SlabAllocator(1 << 18, fence=1)
    released = [1] * (1 << 12)  # for every 64 bytes, the release after which they are free
    allocated: dict[int, int] = {}
    fence, full = 1, 0
    for step in range(2000):
        size = draw.choice([1, 700, 5000, 70_000]) if step % 500 > 20 else 9000
        slot = allocator.allocate(size)
        if slot is None:
            full += 1
        else:
            place, slot_fence = slot
            lines = range(place // 64, (place + slot_bytes(size)) // 64)
            assert place % 64 == 0 and place + slot_bytes(size) <= 1 << 18
            assert max(released[at] for at in lines) <= slot_fence
            for at in lines:
                released[at] = 1 << 60  # allocated
            allocated[place] = size
        while len(allocated) > draw.randrange(12):
            place = draw.choice(list(allocated))
            fence += draw.randrange(2)
            allocator.release(place, fence)
            for at in range(place // 64, (place + slot_bytes(allocated.pop(place))) // 64):
                released[at] = fence
    assert full > 0
    with pytest.raises(_native.LinkError):
        allocator.release(64, fence)


def test_slots_released_first_are_reused_first() -> None:
    allocator = SlabAllocator(3 * 512)
    places = [allocator.allocate(500) for _ in range(3)]
    assert (
        places == [(0, 0), (512, 0), (1024, 0)]
        and allocator.allocate(1) is None
        and allocator.capacity(1) == 3
    )
    allocator.release(512, 1)
    allocator.release(0, 2)
    assert [allocator.allocate(512), allocator.allocate(512), allocator.allocate(512)] == [
        (512, 1),
        (0, 2),
        None,
    ]
    for place in (0, 512, 1024):
        allocator.release(place, 3)
    assert allocator.allocate(1500) == (0, 3)  # all are free: the slab is divided again


@pytest.mark.parametrize("num_bytes", [1, 511, 513, 4097, 1 << 20, (1 << 20) + 1, 123_456_789])
def test_slots_are_at_most_13_percent_larger_than_messages(num_bytes: int) -> None:
    size = slot_bytes(num_bytes)
    assert size % 64 == 0 and num_bytes <= size and (size <= 512 or size < num_bytes * 1.13 + 64)


def test_links_of_gpus_have_both_directions() -> None:
    assert both_ways({(0, 1): 4, (1, 2): 3, (2, 1): 2}) == {(0, 1): 4, (1, 0): 1, (1, 2): 3, (2, 1): 2}


def test_trial_with_another_process(tmp_path: Path) -> None:
    assert cuda_trial.try_direct("tests.late_device:at", str(tmp_path)) == cuda_trial.TRIAL_BYTES


def test_findings_of_the_doctor() -> None:
    subjects = {finding.subject for finding in doctor._cuda()}
    assert subjects >= ({"GPU 0", "GPU memory"} if torch.cuda.is_available() else {"CUDA"})
