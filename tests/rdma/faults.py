"""Failures that must be errors in time on both sides, run like scenarios.py."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from ds_ext.comm import _native
from ds_ext.comm.rdma.devices import choose_port, device_ports
from ds_ext.comm.rdma.setup import RdmaSetup
from ds_ext.errors import TransportError
from tests.rdma.peer import UINT8, Context, Peer, PeerGone
from tests.rdma.scenarios import netem

NOTICED_S = 2.0  # time limit to detect a dead peer
SLACK_S = 1.5  # for a shared, emulated processor


def killed_receiver(context: Context) -> None:
    """kill -9 of a receiver: the sender fails within two seconds, although a forked child is still running."""
    _killed(context, victim=1, victim_sends=False)


def killed_sender(context: Context) -> None:
    """kill -9 of a sender: the receiver fails within two seconds."""
    _killed(context, victim=0, victim_sends=True)


def _killed(context: Context, victim: int, victim_sends: bool) -> None:
    peer = context.peer(window_bytes=1 << 20)
    if peer.rank == victim:
        if os.fork() == 0:
            time.sleep(8.0)
            os._exit(0)
        for number in range(20):
            if victim_sends:
                peer.send(number, [(UINT8, [50_000], number)])
            else:
                peer.recv()
        os.kill(os.getpid(), signal.SIGKILL)
    moved = time.monotonic()
    try:
        for number in range(1_000_000):
            if victim_sends:
                peer.recv()
            else:
                peer.send(number, [(UINT8, [50_000], number)])
            moved = time.monotonic()
    except PeerGone as error:
        noticed = time.monotonic() - moved
        assert noticed < NOTICED_S + SLACK_S, noticed
        assert "ended" in str(error) or "cannot be reached" in str(error), error
        peer.outgoing.abort("the other has ended")
        peer.incoming.close()
        peer.outgoing.close()
        return
    raise AssertionError("nothing was noticed")


def late_peer(context: Context) -> None:
    """A peer that connects two seconds late works. A missing peer is an error within the time limit."""
    peer = context.peer(delay_s=2.0 * context.rank)
    peer.send(1, [(UINT8, [100], 0)])
    peer.compare(peer.recv(), [(UINT8, [100], 0)])
    peer.close()
    if context.rank == 1:
        with contextlib.suppress(TransportError):
            context.peer(delay_s=2.0, timeout_s=1.0)
        return
    began = time.monotonic()
    error = _refusal(lambda: context.peer(timeout_s=1.0))
    assert time.monotonic() - began < 3.0 + SLACK_S
    assert "rank 1" in error and ("within 1 s" in error or "within the time limit" in error), error


class _OtherVersion(RdmaSetup):
    """Send greetings of another version."""

    def _greetings(self, offers: Any) -> dict[int, bytes]:
        greetings = super()._greetings(offers)
        return {peer: bytes([*note[:12], 9, 0, *note[14:]]) for peer, note in greetings.items()}


def wrong_version(context: Context) -> None:
    """Both sides fail, and one error has both versions."""
    error = _refusal(lambda: context.peer(setup=_OtherVersion if context.rank else RdmaSetup))
    expected = "has not connected its side" if context.rank else "this rank has version 1 (got version 9"
    assert expected in error, error


def _refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except TransportError as error:
        return str(error)
    raise AssertionError("it was not refused")


def small_memlock(context: Context) -> None:
    """With an ordinary user's limit on locked memory, set-up fails with the remedy."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
    os.setuid(65534)
    error = _refusal(lambda: context.peer())
    assert "2.5 MiB" in error and "ulimit -l unlimited" in error, error


def memlock_later(context: Context) -> None:
    """With enough locked memory for set-up but not for a large message, only that message fails."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
    os.setuid(65534)
    peer = context.peer()
    peer.send(1, [(UINT8, [1 << 20], 0)])
    peer.compare(peer.recv(), [(UINT8, [1 << 20], 0)])
    try:
        peer.send(2, [(UINT8, [8 << 20], 0)])
        raise AssertionError("8 MiB were registered")
    except OSError as error:
        assert "ulimit -l" in str(error), error
    peer.close()


def aborted(context: Context) -> None:
    """The cause of a failure reaches a waiting peer."""
    peer = context.peer()
    if peer.rank == 0:
        peer.outgoing.abort("ValueError: of the first rank")
        peer.line.get()
        return
    try:
        peer.recv()
        raise AssertionError("a message arrived")
    except PeerGone as error:
        assert str(error) == "failed: ValueError: of the first rank", error
    peer.line.put(None)


def damaged_greetings(context: Context) -> None:
    """Every changed byte of a greeting is refused, and so is the greeting of another job."""
    if context.rank:
        return
    choice = choose_port(device_ports(), context.addresses[0])
    device = _native.RdmaPort(_native.Port(), choice.device, choice.port, choice.gid_index)
    near, far = (_native.RdmaLink(device, rank, 1 - rank, True, True, 1 << 20, 1 << 16) for rank in (0, 1))
    job = bytes(range(16))
    greeting = far.greeting(job)
    for position in range(len(greeting)):
        damaged = bytearray(greeting)
        damaged[position] ^= 0x40
        _refused_greeting(near, bytes(damaged), job)
    _refused_greeting(near, greeting[:-1], job)
    _refused_greeting(near, near.greeting(job), job)
    _refused_greeting(near, greeting, bytes(16))
    near.connect(greeting, job)


def _refused_greeting(link: _native.RdmaLink, greeting: bytes, job: bytes) -> None:
    try:
        link.connect(greeting, job)
    except _native.LinkError:
        return
    raise AssertionError("accepted")


def heavy_loss(context: Context) -> None:
    """With 3 % packet loss, messages pass or both sides fail."""
    netem("loss 3%")
    try:
        peer = context.peer()
        outcome = _flood(peer)
    finally:
        context.line.exchange(None)
        netem(None)
    theirs = context.line.exchange(outcome)
    print(f"rank {context.rank}: {outcome or 'everything passed'}")
    assert (outcome is None) == (theirs is None), (outcome, theirs)
    for words in filter(None, (outcome, theirs)):
        assert "retry counter exceeded" in words or "cannot be reached" in words or "failed" in words, words


def _flood(peer: Peer) -> str | None:
    """Send in one direction, so that the receiver sees no error of its queue. Returns the error, or None."""
    sizes = [10_000] * 30 + [1 << 20] * 10
    try:
        for number, size in enumerate(sizes):
            if peer.rank == 0:
                peer.send(number, [(UINT8, [size], number)])
            else:
                peer.compare(peer.recv(), [(UINT8, [size], number)])
        peer.settle()
    except PeerGone as error:
        return str(error)
    return None


def link_down(context: Context) -> None:
    """After the cable is unplugged, both sides fail in time."""
    peer = context.peer()
    peer.send(0, [(UINT8, [1000], 0)])
    peer.compare(peer.recv(), [(UINT8, [1000], 0)])
    peer.line.exchange(None)
    if peer.rank == 0:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    began = time.monotonic()
    try:
        for number in range(1, 1_000_000):
            if peer.rank == 0:
                peer.send(number, [(UINT8, [10_000], 0)])
            else:
                peer.recv()
        raise AssertionError("nothing was noticed")
    except PeerGone as error:
        took = time.monotonic() - began
        print(f"rank {peer.rank} noticed after {took:.1f} s: {error}")
        assert took < NOTICED_S + SLACK_S, took
        assert ("not answered" if peer.rank else "cannot be reached") in str(error), error
    finally:
        if peer.rank == 0:
            time.sleep(5.0)  # until the other side has failed without this connection
            subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
