"""The small objects inside the ``"ds_ext"`` section: transport_options, fbd and trace. Pure."""

from __future__ import annotations

import ipaddress
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..errors import ConfigError


class Section(BaseModel):
    """An object of the JSON: its keys are known, its types exact, and it never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TransportOptions(Section):
    """How messages between stages travel.

    ``timeout_s`` bounds every wait. ``node_ips``: the addresses at which ranks listen for other hosts, one for each
    host or one for each rank, as a list or with commas between them; None: those from which they reach MASTER_ADDR.
    """

    timeout_s: float = Field(default=120.0, gt=0)
    node_ips: list[str] | None = Field(default=None, min_length=1)

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
                raise ValueError(f"{word!r} is no IPv4 or IPv6 address such as 10.0.0.1") from None
        return value


class FbdOptions(Section):
    """Forward/backward disaggregation: how many backward pipelines a forward one serves, and its sharding.

    ``forward_hosts`` names the hosts whose ranks compute forwards; None: ranks alternate, whatever their hosts.
    """

    merge_forward_tensor_parallel: bool = False
    backward_per_forward: int = Field(default=1, ge=1)
    forward_hosts: list[str] | None = Field(default=None, min_length=1)

    def options(self, tensor_parallel: int) -> dict[str, int]:
        """What is not the default, as the options of a schedule."""
        found = {}
        if self.backward_per_forward > 1:
            found["backward_per_forward"] = self.backward_per_forward
        if self.merge_forward_tensor_parallel:
            found["merge_forward_tensor_parallel"] = tensor_parallel
        return found

    def require_something_to_merge(self, tensor_parallel: int) -> None:
        """Raise ConfigError when forward ranks are to be merged, and there is one of a stage anyway."""
        if self.merge_forward_tensor_parallel and tensor_parallel == 1:
            raise ConfigError(
                '"ds_ext": fbd.merge_forward_tensor_parallel true with tensor_parallel_size 1: a stage has one forward '
                "rank, and there is nothing to merge. Leave it out (--ignore-forward-tensor-parallel too), or set "
                "tensor_parallel_size to 2 or more."
            )


class TraceOptions(Section):
    """Where the ranks' traces go (None: nowhere), and of which steps: ``"10:20"``, ``"100:"`` or all."""

    dir: str | None = Field(default=None, min_length=1)
    steps: str | None = Field(default=None, pattern=r"^[0-9]{0,9}:[0-9]{0,9}$")

    def window(self) -> tuple[int, float]:
        """The first and the last step that are traced, counted from 1. Raises ConfigError when there is none."""
        first, _, last = (self.steps or ":").partition(":")
        window = int(first or 1), float(last or "inf")
        if not 1 <= window[0] <= window[1]:
            raise ConfigError(
                f'"ds_ext": trace.steps {self.steps!r} holds no step: the first is 1, and "10:20" are steps 10 to 20.'
            )
        return window

    def check(self) -> None:
        """Raise ConfigError for steps that are none, or that nobody traces; a ``dir`` of null is tracing put off."""
        self.window()
        if self.steps is not None and "dir" not in self.model_fields_set:
            raise ConfigError(
                f'"ds_ext": trace.steps {self.steps!r} without trace.dir: no step is traced. Say where the traces go, '
                f'"trace": {{"dir": "traces", "steps": "{self.steps}"}}, or leave steps out.'
            )
