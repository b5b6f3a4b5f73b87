"""Types of values whose form a script, DeepSpeed or a file decides, not this package: hence ``Any``. Needs no torch."""

from collections.abc import Callable, Mapping
from typing import Any

Batch = Any  # inputs, outputs or labels of layers: a tensor, or a tuple of tensors; a dataset may yield other values
Pair = tuple[Batch, Batch]  # inputs and labels
Sample = Any  # of a script's dataset
Source = Any  # what a script passes as data: batches by number, an iterator, or a dataset
Layer = Any  # entry of a script's list of layers: a LayerSpec of DeepSpeed, which has no types, a module or a function
Function = Callable[..., Any]  # function or module of a script or of DeepSpeed
Optimizer = (
    Any  # torch's, a script's, or one of DeepSpeed's wrappers, which have no types; None on a forward rank
)
Scheduler = Any  # of learning rates: torch's, DeepSpeed's or a script's; None without one
ParameterGroup = dict[str, Any]  # of an optimizer, in torch's type
Parameters = Any  # element of an optimizer's list: a parameter, a pair (name, parameter) or a group of either
Groups = list[Parameters]
# Value in a checkpoint or a snapshot: numbers, strings, tensors, and lists and dictionaries of them.
Saved = Any
# Object of a JSON file, a message or a pickled state, which its reader takes apart by key.
Record = dict[str, Any]
Json = Mapping[str, Any]  # the same, only read, such as DeepSpeed's JSON
