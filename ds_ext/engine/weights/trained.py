"""Parameters that a rank trains, and changes of ``requires_grad`` after the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from torch import nn

from ...errors import ConfigError
from ..all_ranks import on_all_ranks
from ..engine_state import EngineState
from ..parameters import parameters_of
from ..ties.tied_layers import check_ties


class TrainedParameters:
    """Parameters of this rank that require gradients, and those that a script has frozen or unfrozen since a step.

    Ranks may change ``requires_grad`` at different times, and reductions would then wait forever. So the first step
    after a change still reduces the old set. With its losses, the ranks gather whether one of them has changes, and
    then compare them.

    Attributes:
        changed: parameters whose ``requires_grad`` differs from that of the last step.
    """

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        parameters = parameters_of(engine.module, engine.layout.tensor_parallel_size).values()
        self._parameters = [*parameters] if engine.role.has_gradients else []
        self._objects = [local.parameter for local in self._parameters]
        self._flags = self._read()
        self.changed: list[nn.Parameter] = []

    def _read(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._objects]

    def find_changes(self) -> None:
        """Find the parameters whose ``requires_grad`` changed since the last step, and mark them for later steps."""
        rows = zip(self._objects, self._read(), self._flags, strict=True)
        self.changed = [parameter for parameter, now, before in rows if now != before]
        for parameter in self.changed:
            parameter.was_trained = True  # pyright: ignore[reportAttributeAccessIssue]

    @contextmanager
    def before_changes(self) -> Iterator[None]:
        """Context of a reduction, in which parameters require gradients as in the last step."""
        self._toggle()
        try:
            yield
        finally:
            self._toggle()

    def _toggle(self) -> None:
        for parameter in self.changed:
            parameter.requires_grad_(not parameter.requires_grad)

    def agree_on_changes(self) -> list[nn.Parameter]:
        """Compare the changes of all ranks, and return the parameters that are trained from this step on.

        All ranks must call this together.
        """
        known: dict[str, tuple[bool, int]] = {}
        for rank, flags in enumerate(on_all_ranks(self._checked_flags)):
            for name, flag in flags.items():
                other, first = known.setdefault(name, (flag, rank))
                if flag != other:
                    raise ConfigError(
                        f"{name}: requires_grad must be the same on all ranks with this parameter (got {other} on rank "
                        f"{first}, {flag} on rank {rank}). Set it in the same step on all ranks."
                    ).of_all_ranks()
        unfrozen = [parameter for parameter in self.changed if parameter.requires_grad]
        self._flags, self.changed = self._read(), []
        return unfrozen

    def _checked_flags(self) -> dict[str, bool]:
        """Return whether each parameter is trained, by name, after checking that the changes are supported."""
        self._require_supported_changes()
        check_ties(self._engine.module)
        return {local.name: local.parameter.requires_grad for local in self._parameters}

    def _require_supported_changes(self) -> None:
        optimizer, changed = self._engine.optimizer, set(map(id, self.changed))
        supported = set[int]()
        fix = "Save a checkpoint, and load it in a job that starts with this requires_grad"
        if not isinstance(optimizer, DeepSpeedOptimizer):  # torch's skip parameters without gradients
            in_groups = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
            supported = in_groups | {
                id(parameter) for parameter in self.changed if not parameter.requires_grad
            }
            fix = "Pass module.parameters() to initialize(), or call engine.optimizer.add_param_group() before the step"
        missing = [local for local in self._parameters if id(local.parameter) in changed - supported]
        if missing:
            names = ", ".join([*(local.name for local in missing[:4]), "..."][: len(missing)])
            raise ConfigError(
                f"{names}: the optimizer does not support a requires_grad that was changed after initialize() (got "
                f"{missing[0].parameter.requires_grad}). {fix}."
            )
