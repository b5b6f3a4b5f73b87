"""Objects inside the ``"ds_ext"`` section: transport_options, fbd, trace and recovery. Needs no torch."""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..errors import ConfigError


class Section(BaseModel):
    """Frozen object of the JSON. Unknown keys are rejected, and values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TransportOptions(Section):
    """Options of the transport between stages.

    Attributes:
        timeout_s: time limit on every wait, in seconds.
        node_ips: addresses on which ranks listen for other hosts, one per host or one per rank, as a list or a
            comma-separated string; None: each rank's local address on the route to MASTER_ADDR.
        communicator_mib: GPU memory of an NCCL communicator that the printed plan assumes, in MiB.
    """

    timeout_s: float = Field(default=120.0, gt=0)
    node_ips: list[str] | None = Field(default=None, min_length=1)
    communicator_mib: int = Field(default=512, ge=0)

    @field_validator("node_ips", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [word.strip() for word in value.split(",")] if isinstance(value, str) else value

    @field_validator("node_ips")
    @classmethod
    def _are_addresses(cls, value: list[str] | None) -> list[str] | None:
        for word in value or ():
            try:
                ipaddress.ip_address(word.partition("%")[0])
            except ValueError:
                raise ValueError(f"{word!r} is not an IPv4 or IPv6 address such as 10.0.0.1") from None
        return value


class FbdOptions(Section):
    """Options of forward/backward disaggregation.

    Attributes:
        merge_forward_tensor_parallel: run each stage's forward on one rank with whole weights.
        backward_per_forward: number of backward pipelines that one forward pipeline serves.
        forward_hosts: hosts whose ranks compute forwards; None: roles alternate by rank, regardless of hosts.
    """

    merge_forward_tensor_parallel: bool = False
    backward_per_forward: int = Field(default=1, ge=1)
    forward_hosts: list[str] | None = Field(default=None, min_length=1)

    def options(self, tensor_parallel: int) -> dict[str, int]:
        """Return the non-default settings as schedule options."""
        options = {}
        if self.backward_per_forward > 1:
            options["backward_per_forward"] = self.backward_per_forward
        if self.merge_forward_tensor_parallel:
            options["merge_forward_tensor_parallel"] = tensor_parallel
        return options

    def require_something_to_merge(self, tensor_parallel: int) -> None:
        if self.merge_forward_tensor_parallel and tensor_parallel == 1:
            raise ConfigError(
                "ds_ext.fbd.merge_forward_tensor_parallel: no forward ranks to merge (got tensor_parallel_size 1). "
                "Omit it (and --ignore-forward-tensor-parallel), or set tensor_parallel_size to 2 or more."
            )


class TraceOptions(Section):
    """Options of tracing.

    Attributes:
        dir: folder of the ranks' traces; None: no tracing.
        steps: traced steps, inclusive, as ``"10:20"``, ``"100:"`` or ``":50"``; None: all.
    """

    dir: str | None = Field(default=None, min_length=1)
    steps: str | None = Field(default=None, pattern=r"^[0-9]{0,9}:[0-9]{0,9}$")

    def window(self) -> tuple[int, float]:
        """Return the first and the last traced step, counted from 1."""
        first, _, last = (self.steps or ":").partition(":")
        first_step, last_step = int(first or 1), float(last or "inf")
        if not 1 <= first_step <= last_step:
            raise ConfigError(
                f'ds_ext.trace.steps: empty range of steps (got {self.steps!r}). Steps count from 1; "10:20" traces '
                "steps 10 to 20."
            )
        return first_step, last_step

    def check(self) -> None:
        """Raise ConfigError for an empty range, or for ``steps`` without ``dir``. A null ``dir`` disables tracing."""
        self.window()
        if self.steps is not None and "dir" not in self.model_fields_set:
            raise ConfigError(
                f"ds_ext.trace.steps: no folder for the traces (got {self.steps!r} without trace.dir). Set "
                f'"trace": {{"dir": "traces", "steps": "{self.steps}"}}, or omit steps.'
            )


class RecoveryOptions(Section):
    """Options of snapshots in host memory.

    Attributes:
        every: steps from one snapshot to the next.
        second_copy: key "copy": "mirror": each snapshot is copied to another host, that of the rank's mirror if
            possible; "none": there is no second copy.
    """

    every: int = Field(default=1, ge=1)
    second_copy: Literal["mirror", "none"] = Field(default="mirror", alias="copy")
