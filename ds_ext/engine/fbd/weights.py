"""Transfer of new weights from backward to forward ranks.

Every transfer starts with a header: the version, which is the number of steps that changed the weights, and the number
of pieces that follow, 0 for an unchanged version. A piece consists of flattened parameters of one dtype. Both ends
derive from the shapes which parameters a piece contains. A merged forward rank receives the shards of all
tensor-parallel ranks and concatenates them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...comm.channels import FBD_WEIGHT_HEADERS, FBD_WEIGHT_PIECES, stage_channel
from ...comm.transport import Ticket, Transport, make_tag
from ...errors import TransportError
from ...tensor_parallel import shard_dim
from ..module import PipelineModule
from ..parameters import buffers_of, layers_of
from ..weights.gradients import flatten

_PIECE_BYTES = 32 << 20
# Larger weights are received immediately, because their sender may wait for link credits or memory.
LAZY_BYTES = 128 << 20
ShardSpec = tuple[int, torch.Size, torch.dtype]  # index of the parameter, shape of its shard, dtype


class WeightLink:
    """One end of a link for weights.

    Args:
        parameters: parameters and buffers of this rank, in the same order on both ends.
        peers: backward ranks whose shards form this rank's weights; on a backward rank, the forward rank.
        shards: number of shards per weight of this rank; 1: it has the same shards as its peer.

    Attributes:
        version: version that was sent or received last; -1: none.
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
        self._num_headers = self._num_pieces = 0
        self._posted: list[Ticket] | None = None

    # --- backward rank ---

    def send(self, version: int) -> None:
        """Send all weights as ``version``, or only the header if this was the last version sent."""
        pieces = self._pieces() if version != self.version else []
        header = torch.tensor([version, len(pieces)], dtype=torch.int64, device=self._device)
        (peer,) = self.peers
        self.transport.send([header], peer, self._header_tag())
        for piece in pieces:
            flat = flatten([self.parameters[i].detach() for i, _, _ in piece])
            self.transport.send([flat], peer, self._piece_tag())
        self.version = version

    # --- forward rank ---

    def expect(self, limit_s: float | None = None) -> None:
        """Post the receive of the next version. Large weights are received immediately, within ``limit_s``."""
        self.settle()
        tag = self._header_tag()
        self._posted = [self.transport.recv(peer, tag) for peer in self.peers]
        if sum(p.numel() * p.element_size() for p in self.parameters) > LAZY_BYTES * self.shards:
            self.settle(limit_s)

    def settle(self, limit_s: float | None = None) -> None:
        """Wait for the version whose receive was posted, if any, and copy it to the parameters.

        ``limit_s`` limits the wait for the first message; None: as for any message.
        """
        if self._posted is None:
            return
        headers = [ticket.wait(limit_s)[0].tolist() for ticket in self._posted]
        self._posted = None
        version, count = headers[0]
        if any(header != headers[0] for header in headers) or version < self.version:
            raise TransportError(
                f"weights of stage {self.stage}: the versions must be equal and at least {self.version} (got "
                f"{', '.join(str(v) for v, _ in headers)} from the backward ranks {', '.join(map(str, self.peers))})."
            )
        with torch.no_grad():
            for piece in self._pieces()[:count]:
                tag = self._piece_tag()
                tickets = [self.transport.recv(peer, tag) for peer in self.peers]
                self._copy(piece, [ticket.wait()[0] for ticket in tickets])
        self.version = version

    def _copy(self, piece: list[ShardSpec], flats: list[Tensor]) -> None:
        """Copy a piece to the parameters. ``flats`` has the flattened shards of every sender."""
        start = 0
        for index, shape, _ in piece:
            parameter = self.parameters[index]
            end = start + shape.numel()
            dim = shard_dim(parameter)
            shards = [flat[start:end].view(shape) for flat in flats]
            if len(shards) > 1 and dim is not None:
                torch.cat(shards, dim, out=parameter.data)
            else:
                parameter.copy_(shards[0])
            start = end

    # --- both ---

    @property
    def _device(self) -> torch.device:
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    def _header_tag(self) -> int:
        self._num_headers += 1
        return make_tag(stage_channel(FBD_WEIGHT_HEADERS, self.stage), self._num_headers - 1)

    def _piece_tag(self) -> int:
        self._num_pieces += 1
        return make_tag(stage_channel(FBD_WEIGHT_PIECES, self.stage), self._num_pieces - 1)

    def _pieces(self) -> list[list[ShardSpec]]:
        """Return the parameters of every piece: at most 32 MiB of one dtype, or a single parameter."""
        pieces: list[list[ShardSpec]] = []
        bytes_left = 0
        last_dtype = None
        for index, parameter in enumerate(self.parameters):
            shape = self._sender_shape(parameter)
            num_bytes = shape.numel() * parameter.dtype.itemsize
            if parameter.dtype != last_dtype or bytes_left < num_bytes:
                pieces.append([])
                bytes_left = _PIECE_BYTES
                last_dtype = parameter.dtype
            pieces[-1].append((index, shape, parameter.dtype))
            bytes_left -= num_bytes
        return pieces

    def _sender_shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of a parameter's shard on each sender, of which this rank concatenates ``shards``."""
        shape = list(parameter.shape)
        dim = shard_dim(parameter)
        if dim is not None:
            shape[dim] //= self.shards
        return torch.Size(shape)


def weights_in_order(module: PipelineModule) -> list[Tensor]:
    """Return the parameters and persistent buffers of a rank's stage, in the same order on all ranks that hold it.

    Layers may change buffers (running means), and checkpoints contain them. A buffer must be changed in place: a new
    tensor assigned to its name is not sent.
    """
    parameters = [*module.layer_parameters()]
    return parameters + [buffer for layer in layers_of(module).values() for _, buffer in buffers_of(layer)]
