"""Attributes of the engines exist: DeepSpeed's engine would silently look up a misspelt one in its module."""

from __future__ import annotations

import ast
import inspect

from ds_ext.engine import PipelineEngine

# The constructors of DeepSpeed's engines set these.
PARENTS = {
    "pipe_buffers", "device", "global_rank", "global_steps", "micro_batches", "micro_batch_size", "dp_world_size",
    "collate_fn", "module", "optimizer", "mpu", "monitor", "global_samples", "skipped_steps", "micro_steps",
    "batch_fn", "grid", "timers", "_step_applied", "gradient_average",
}  # fmt: skip


def test_every_attribute_exists() -> None:
    ours = [each for each in PipelineEngine.__mro__ if each.__module__.startswith("ds_ext.")]
    used, assigned = set(), set()
    for node in (node for each in ours for node in ast.walk(ast.parse(inspect.getsource(each)))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            (assigned if isinstance(node.ctx, ast.Store) else used).add(node.attr)
    unknown = {name for name in used - assigned - PARENTS if not hasattr(PipelineEngine, name)}
    assert unknown == set()
