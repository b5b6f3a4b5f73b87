"""New weights, sent from backward ranks to the forward ranks that compute with them.

A message per sync holds the version (steps that changed the weights) and the number of pieces that follow: none when
nothing has changed. A piece is some parameters of the stage, flattened, in the model's precision; both sides derive its
parameters from the shapes. A merged forward rank gets the shards of all tensor-parallel ranks and joins them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ...comm.transport import Ticket, Transport, make_tag
from ...errors import TransportError
from ...tensor_parallel import shard_dim
from ..checkpoint.states import buffers_of, layers_of
from ..module import PipelineModule

_PIECE_BYTES = 32 << 20
# More than this is received at once, as a sender may have to wait for room.
LAZY_BYTES = 128 << 20
Shaped = tuple[int, torch.Size, torch.dtype]  # place of the parameter, shape of its shard


class WeightLink:
    """One end of the link.

    Args:
        transport: moves messages by (rank, tag).
        parameters: of this rank, and its buffers, in the same order on both ends.
        peers: the other end: the backward ranks whose shards make this rank's weights, or the forward rank.
        shards: into how many pieces a sender's tensor-parallel group cuts what this rank has whole; 1: none.
        stage: of the weights.
    """

    def __init__(
        self,
        transport: Transport,
        parameters: Sequence[Tensor],
        peers: Sequence[int],
        shards: int,
        stage: int,
    ) -> None:
        self.transport, self.parameters, self.peers = transport, list(parameters), tuple(peers)
        self.shards, self.stage = shards, stage
        self.version = -1
        self._syncs = self._pieces_moved = 0
        self._expected: list[Ticket] | None = None

    # --- the backward side ---

    def send(self, version: int) -> None:
        """Send all weights as ``version``; only its number when it is the one that was sent last."""
        pieces = self._pieces() if version != self.version else []
        header = torch.tensor([version, len(pieces)], dtype=torch.int64, device=self._device)
        (peer,) = self.peers
        self.transport.send([header], peer, self._tag(2 * self._syncs))
        self._syncs += 1
        for piece in pieces:
            flat = _flatten_dense_tensors([self.parameters[i].detach() for i, _, _ in piece])
            self.transport.send([flat], peer, self._tag(2 * self._pieces_moved + 1))
            self._pieces_moved += 1
        self.version = version

    # --- the forward side ---

    def expect(self, limit_s: float | None = None) -> None:
        """Ask for the next version; receive it now, as settle() does, if it is so large that its sender might wait."""
        self.settle()
        self._expected = [self.transport.recv(peer, self._tag(2 * self._syncs)) for peer in self.peers]
        self._syncs += 1
        if sum(p.numel() * p.element_size() for p in self.parameters) > LAZY_BYTES * self.shards:
            self.settle(limit_s)

    def settle(self, limit_s: float | None = None) -> None:
        """Wait for the version that was asked for, if one was, and put it in place.

        Args:
            limit_s: how long its first message may take; None: as long as any message.

        Raises:
            TransportError: it does not come, or the senders have different ones, or older ones.
        """
        if self._expected is None:
            return
        headers = [ticket.wait(limit_s)[0].tolist() for ticket in self._expected]
        self._expected = None
        version, count = headers[0]
        if any(header != headers[0] for header in headers) or version < self.version:
            raise TransportError(
                f"the backward ranks {', '.join(map(str, self.peers))} sent the versions "
                f"{', '.join(str(v) for v, _ in headers)} of the weights of stage {self.stage}; this forward rank has "
                f"version {self.version}, and they must agree on that or a later one."
            )
        with torch.no_grad():
            for piece in self._pieces()[:count]:
                item = 2 * self._pieces_moved + 1
                tickets = [self.transport.recv(peer, self._tag(item)) for peer in self.peers]
                self._pieces_moved += 1
                self._place(piece, [ticket.wait()[0] for ticket in tickets])
        self.version = version

    def _place(self, piece: list[Shaped], flats: list[Tensor]) -> None:
        """Copy a piece, of which every sender has its shard."""
        at = 0
        for index, shape, _ in piece:
            parameter, end = self.parameters[index], at + shape.numel()
            dim = shard_dim(parameter)
            shards = [flat[at:end].view(shape) for flat in flats]
            if len(shards) > 1 and dim is not None:
                torch.cat(shards, dim, out=parameter.data)
            else:
                parameter.copy_(shards[0])
            at = end

    # --- what both sides know ---

    @property
    def _device(self) -> torch.device:
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    def _tag(self, item: int) -> int:
        # Versions and pieces are two channels: each has its own order.
        return make_tag(2 * self.stage + item % 2, item // 2)

    def _pieces(self) -> list[list[Shaped]]:
        """Return the parameters by message: at most 32 MiB of one precision each."""
        pieces: list[list[Shaped]] = []
        room, last = 0, None
        for index, shape, kind in self._shapes():
            size = shape.numel() * kind.itemsize
            if kind != last or room < size:
                pieces.append([])
                room, last = _PIECE_BYTES, kind
            pieces[-1].append((index, shape, kind))
            room -= size
        return pieces

    def _shapes(self) -> Iterator[Shaped]:
        """Yield every parameter's shape as the senders have it."""
        for index, parameter in enumerate(self.parameters):
            shape, dim = list(parameter.shape), shard_dim(parameter)
            if dim is not None:
                shape[dim] //= self.shards
            yield index, torch.Size(shape), parameter.dtype


def weights_in_order(module: PipelineModule) -> list[Tensor]:
    """The parameters and persistent buffers of a rank's stage; the same order on all ranks that hold it.

    Buffers too, as a layer may change them (running means), and a checkpoint brings others. One that is not changed in
    place, but replaced, is not followed.
    """
    parameters = [parameter for _, parameter in module.named_parameters()]
    return parameters + [buffer for _, layer in layers_of(module).values() for _, buffer in buffers_of(layer)]
