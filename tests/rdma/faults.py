"""What must end with an error, in time and on both sides; run as scenarios.py is."""

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

NOTICED_S = 2.0  # a dead peer is noticed within this time
SLACK_S = 1.5  # for an emulated processor that is shared with others


def killed_receiver(context: Context) -> None:
    """kill -9 of a peer that receives: the sender is told within two seconds, with a forked child of it alive."""
    _killed(context, victim=1, victim_sends=False)


def killed_sender(context: Context) -> None:
    """kill -9 of a peer that sends: the receiver is told within two seconds."""
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
    """One side connects two seconds after the other, and then works; one that never comes is an error in time."""
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
    assert "rank 1" in error and ("did not connect within 1 s" in error or "silent" in error), error


class _OtherVersion(RdmaSetup):
    """Greets as another version would."""

    def _greetings(self, offers: Any) -> dict[int, bytes]:
        greetings = super()._greetings(offers)
        return {peer: bytes([*note[:12], 9, 0, *note[14:]]) for peer, note in greetings.items()}


def wrong_version(context: Context) -> None:
    """Both sides refuse, and one says which versions met."""
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
    """An ordinary user's limit on locked memory: refused at set-up with the remedy; refused later on both sides."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
    os.setuid(65534)
    error = _refusal(lambda: context.peer())
    assert "needs 2.5 MiB of locked memory" in error and "ulimit -l unlimited" in error, error


def memlock_later(context: Context) -> None:
    """Enough for the set-up, too little for a large message: that one is an error, and says why."""
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
    """The first cause reaches a peer that only waits."""
    peer = context.peer()
    if peer.rank == 0:
        peer.outgoing.abort("ValueError: of the first rank")
        peer.line.get()
        return
    try:
        peer.recv()
        raise AssertionError("it came")
    except PeerGone as error:
        assert str(error) == "failed: ValueError: of the first rank", error
    peer.line.put(None)


def damaged_greetings(context: Context) -> None:
    """Each changed byte of a greeting is refused, and so is another job's."""
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
    raise AssertionError("it was believed")


def heavy_loss(context: Context) -> None:
    """Three of a hundred: small messages pass; large ones pass, or end with an error on both sides."""
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
    """One way, so that the receiver learns of a failure only by being told. What ended it, if so."""
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
    """The cable is pulled: both sides end with an error, and in time."""
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
            time.sleep(5.0)  # the other side is told nothing until it has noticed
            subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
