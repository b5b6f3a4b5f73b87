"""Independent rank with pyverbs, written from kernels/README.md alone, to check that the native code matches it."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

from ds_ext.comm.rdma.setup import RdmaOffer
from ds_ext.comm.tcp.connect import TcpListener, connect_peers
from tests.rdma.peer import Line

BLOCK, BLOCKS = 256, 1024
GREETING = struct.Struct("<8sIHHII16sII16sHBBIQQQII20sI")
DESCRIPTOR = struct.Struct("<4sHHHHIIIQQQQQQ8qQ108sI")
NOTICE = struct.Struct("<4sHHQQQII26QII")
KIND_RECEIPT = 1


def pyverbs() -> Any:
    """Import the distribution's package without its other packages."""
    place = "/run/pyverbs"
    os.makedirs(place, exist_ok=True)
    if not os.path.islink(f"{place}/pyverbs"):
        os.symlink("/usr/lib/python3/dist-packages/pyverbs", f"{place}/pyverbs")
    sys.path.append(place)
    import pyverbs  # type: ignore[import-not-found]

    return pyverbs


def crc32c(data: bytes) -> int:
    """Return CRC-32C bit by bit, from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def sealed(block: bytes) -> bytes:
    return block[:-4] + struct.pack("<I", crc32c(block[:-4]))


class PyverbsPeer:
    """Rank 1, connected to rank 0 with the native code."""

    def __init__(self, line: Line, address: str, slab_bytes: int) -> None:
        pyverbs()
        import pyverbs.enums as e  # type: ignore[import-not-found]
        from pyverbs.cq import CQ  # type: ignore[import-not-found]
        from pyverbs.device import Context  # type: ignore[import-not-found]
        from pyverbs.mr import MR  # type: ignore[import-not-found]
        from pyverbs.pd import PD  # type: ignore[import-not-found]
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # type: ignore[import-not-found]

        self.e = e
        context = Context(name=os.listdir("/sys/class/infiniband")[0])
        domain = PD(context)
        both = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.inbox, self.outbox = MR(domain, BLOCKS * BLOCK, both), MR(domain, BLOCKS * BLOCK, both)
        self.slab, self.mirror = MR(domain, slab_bytes, both), MR(domain, slab_bytes, both)
        self.queue = CQ(context, 4 * BLOCKS)
        capacity = QPCap(max_send_wr=BLOCKS, max_recv_wr=BLOCKS, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=capacity)
        self.pair = QP(domain, init)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = both
        self.pair.to_init(attributes)
        for _ in range(BLOCKS):
            self._expect()
        self.keep = [context, domain, both]
        self.sent = self.received = 0
        self._connect_rank(line, address, slab_bytes, context.query_gid(1, 1))

    def _connect_rank(self, line: Line, address: str, slab_bytes: int, gid: Any) -> None:
        listener = TcpListener(address)
        theirs = line.exchange(RdmaOffer(listener.offer(), "Ethernet", slab_bytes))
        raw = ipaddress.IPv6Address(str(gid)).packed
        token = listener.token
        mine = GREETING.pack(
            *(b"DSX-RDMA", 0x01020304, 1, 0, 1, 0, token, self.pair.qp_num, 77, raw, 0, 5, 0, BLOCKS),
            *(self.inbox.buf, self.slab.buf, slab_bytes, self.inbox.rkey, self.slab.rkey, bytes(20), 0),
        )
        connection = connect_peers(listener, 1, {0: theirs.tcp}, {0: sealed(mine)}, 20.0)[0]
        self.control: socket.socket = connection.socket
        found = GREETING.unpack(connection.note)
        assert connection.note == sealed(connection.note), "the greeting's checksum"
        assert found[:7] == (b"DSX-RDMA", 0x01020304, 1, 0, 0, 1, token), found
        assert found[13] == BLOCKS and found[19] == bytes(20), found
        _, _, _, _, _, _, _, number, packet, their_gid, _, mtu, _, _, *places, _, _ = found
        self.their_inbox, self.their_slab, self.their_bytes, self.inbox_key, self.slab_key = places
        self._connect(number, packet, their_gid, mtu)
        self.control.sendall(b"\1")
        assert self.control.recv(1) == b"\1"

    def _connect(self, number: int, packet: int, gid: bytes, mtu: int) -> None:
        from pyverbs.addr import AHAttr, GlobalRoute  # type: ignore[import-not-found]
        from pyverbs.qp import QPAttr  # type: ignore[import-not-found]

        e = self.e
        attributes = QPAttr(port_num=1)
        attributes.path_mtu = mtu
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = number, packet, 77
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 0
        attributes.min_rnr_timer, attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = (
            12,
            16,
            6,
            7,
        )
        attributes.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        from pyverbs.addr import GID  # type: ignore[import-not-found]

        text = ":".join(gid.hex()[at : at + 4] for at in range(0, 32, 4))
        route = GlobalRoute(dgid=GID(text), sgid_index=1, hop_limit=64)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.pair.to_rts(attributes)

    def _expect(self) -> None:
        from pyverbs.wr import SGE, RecvWR  # type: ignore[import-not-found]

        self.pair.post_recv(RecvWR(sg=[SGE(self.inbox.buf, 0, self.inbox.lkey)], num_sge=1))

    def next_block(self, limit_s: float = 20.0) -> bytes:
        """The next block that our module has written."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            count, completions = self.queue.poll(1)
            if not count:
                time.sleep(0.001)
                continue
            (completion,) = completions
            assert completion.status == self.e.IBV_WC_SUCCESS, completion
            if completion.opcode != self.e.IBV_WC_RECV_RDMA_WITH_IMM:
                continue
            assert socket.ntohl(completion.imm_data) == self.received, completion
            block = self.inbox.read(BLOCK, self.received % BLOCKS * BLOCK)
            self.received += 1
            self._expect()
            assert block == sealed(block), "the checksum of a block"
            return block
        raise TimeoutError("no block came")

    def next_message(self) -> tuple[list[tuple[Any, ...]], bytes]:
        """The descriptors of the next message, unpacked, and its body; receipts before it are left out."""
        block = self.next_block()
        while block[:4] == b"DSN1":
            block = self.next_block()
        first = DESCRIPTOR.unpack(block)
        count, body_bytes, place = first[7], first[13], first[22]
        assert place >> 40 == 0
        table = [self.slab.read(BLOCK, place + body_bytes + at * BLOCK) for at in range(count - 1)]
        assert all(each == sealed(each) for each in table)
        body = self.slab.read(body_bytes, place) if body_bytes else b""
        return [first, *map(DESCRIPTOR.unpack, table)], body

    def give_back(self, taken: int, places: Sequence[int]) -> None:
        head = (b"DSN1", 1, KIND_RECEIPT, taken, 0, 0, 0, len(places))
        self.write_block(sealed(NOTICE.pack(*head, *places, *[0] * (26 - len(places)), 0, 0)))

    def next_receipt(self) -> tuple[int, list[int]]:
        """(messages taken, slots that came back)."""
        magic, version, kind, taken, _, _, _, count, *rest = NOTICE.unpack(self.next_block())
        assert (magic, version, kind) == (b"DSN1", 1, KIND_RECEIPT)
        return taken, list(rest[:count])

    def send(self, body: bytes, place: int, descriptor: bytes) -> None:
        """A body to its slot, then the block."""
        self.mirror.write(body, len(body), place)
        self._write(self.mirror, place, len(body), self.their_slab + place, self.slab_key, None)
        self.write_block(descriptor)

    def write_block(self, block: bytes) -> None:
        at = self.sent % BLOCKS * BLOCK
        self.outbox.write(block, BLOCK, at)
        self._write(self.outbox, at, BLOCK, self.their_inbox + at, self.inbox_key, self.sent)
        self.sent += 1

    def _write(self, region: Any, at: int, size: int, target: int, key: int, number: int | None) -> None:
        from pyverbs.wr import SGE, SendWR  # type: ignore[import-not-found]

        e = self.e
        entry = SGE(region.buf + at, size, region.lkey)
        if number is None:
            request = SendWR(num_sge=1, sg=[entry], opcode=e.IBV_WR_RDMA_WRITE, send_flags=0)
        else:
            flags = e.IBV_SEND_SIGNALED | e.IBV_SEND_SOLICITED
            operation = e.IBV_WR_RDMA_WRITE_WITH_IMM
            request = SendWR(
                num_sge=1, sg=[entry], opcode=operation, send_flags=flags, imm_data=socket.htonl(number)
            )
        request.set_wr_rdma(key, target)
        self.pair.post_send(request)


def describe(
    tag: int, number: int, dtype: int, shape: Sequence[int], size: int, place: int, body_bytes: int
) -> bytes:
    """A descriptor of a message of one tensor, the `number`-th of its link and channel."""
    head = (b"DSX1", 1, 256, dtype, len(shape), tag, 0, 1, number, number, 0, 0, size, body_bytes)
    return sealed(DESCRIPTOR.pack(*head, *shape, *[0] * (8 - len(shape)), place, bytes(108), 0))
