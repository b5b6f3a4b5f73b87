"""Every field of peft's LoraConfig has the effect that it has in peft, or is refused by its name."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from ds_ext.errors import ConfigError
from ds_ext.hf.lora import FIELDS, Adapters
from tests.distributed import test_lora

peft: Any = pytest.importorskip("peft")
NAMES = [field.name for field in dataclasses.fields(peft.LoraConfig)]
# Compared with peft in tests/distributed/test_lora.py, as the fields of its table.
COMPARED = {name for names in test_lora.FIELDS for name in names.split()}
COMPARED |= {"r", "lora_alpha", "target_modules", "init_lora_weights"}
OF_BOTH = {"lora_dropout", "bias", "fan_in_fan_out"}  # the layers of peft read them
REFUSED_OUTSIDE_OF_LAYERS = {"trainable_token_indices"}
WITHOUT_EFFECT = {  # on training; the last four need initial values that are refused
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}


def test_every_accepted_field_is_known() -> None:
    assert set(NAMES) >= FIELDS == COMPARED | OF_BOTH | REFUSED_OUTSIDE_OF_LAYERS | WITHOUT_EFFECT


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FIELDS])
def test_other_fields_are_refused_by_name(name: str) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"])
    setattr(config, name, [(0, 1)])
    none: Any = None
    with pytest.raises(ConfigError, match=rf"^lora: {name} .*{re.escape('[(0, 1)]')}"):
        Adapters(config, none, none)


def test_copies_of_layers_are_refused() -> None:
    assert {"layer_replication", "alora_invocation_tokens", "inference_mode"} <= set(NAMES) - FIELDS
