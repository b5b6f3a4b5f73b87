"""DeepSpeed's engine answers for attributes of its module: a misspelt one would silently become the module's."""

from __future__ import annotations

import ast
import inspect

from ds_ext.engine.engine import PipelineEngine
from ds_ext.engine.handlers import InstructionHandlers
from ds_ext.engine.schedule_methods import ScheduleMethods

# Set by the constructors of DeepSpeed's engines.
PARENTS = {
    "pipe_buffers", "device", "global_rank", "global_steps", "micro_batches", "micro_batch_size", "dp_world_size",
    "collate_fn", "module", "optimizer", "mpu", "monitor", "global_samples", "skipped_steps",
}  # fmt: skip


def test_every_attribute_of_the_engine_is_its_own() -> None:
    classes = (PipelineEngine, ScheduleMethods, InstructionHandlers)
    nodes = [node for each in classes for node in ast.walk(ast.parse(inspect.getsource(each)))]
    used, made = set(), set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            (made if isinstance(node.ctx, ast.Store) else used).add(node.attr)
    unknown = {name for name in used - made - PARENTS if not hasattr(PipelineEngine, name)}
    assert unknown == set()
