"""JSON files and commands that fine-tune a Hugging Face model on prepared data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...environment import has_bf16_instructions, host_devices, host_gpus

EPOCHS_OF_CHAT, EPOCHS_OF_TEXT = 3, 1
BATCH = 16  # samples per step
FULL_RATE, LORA_RATE = 1e-5, 2e-4
RANK = 8  # of adapters
WARMUP = 0.03  # share of the steps
BUCKET_SIZE = 50_000_000  # elements; DeepSpeed allocates two buckets, 4 GB in fp32 with its default
MAX_SEQ_LENGTH = 4096
TEXT_SEQ_LENGTH = 1024
MAX_EVAL_ITERS = 10
FULL, LORA = "finetune.json", "lora.json"
_SECTIONS = {"bfloat16": "bf16", "float16": "fp16"}


def seq_length_of(meta: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """Return a length of samples, in tokens.

    It truncates no conversation, unless the model has fewer positions or it would exceed ``MAX_SEQ_LENGTH``. ``meta``
    is the content of meta.json, ``model`` that of config.json (empty: unknown).
    """
    length = TEXT_SEQ_LENGTH
    if "longer_than" in meta:
        from .chat.files import COMMON_LENGTHS

        fitting = (length for length in COMMON_LENGTHS if not meta["longer_than"].get(str(length)))
        length = min(MAX_SEQ_LENGTH, next(fitting, MAX_SEQ_LENGTH))
    limits = [model.get(key) for key in ("max_position_embeddings", "n_positions")]
    return min([length, *(limit for limit in limits if isinstance(limit, int))])


def checkpoints_of(output: Path) -> str:
    """Return a folder for the checkpoints of the jobs on a folder of data, another one for each folder."""
    if output.is_absolute():
        return str(output / "checkpoints")
    return str(Path("checkpoints", *(part for part in output.parts if part not in ("..", "data"))))


def write_jobs(
    model: Path, output: Path, meta: Mapping[str, Any], epochs: float | None = None
) -> tuple[list[str], str]:
    """Write the JSON of each job into the folder of the data, and return the command of each, and a note or "".

    ``finetune.json`` trains all weights. ``lora.json``, for chat data, trains adapters. A folder without weights of a
    decoder has no jobs. ``epochs`` is 3 for chats and 1 for text by default.
    """
    if not (model / "config.json").is_file() or not any(model.glob("*.safetensors")):
        return [], ""
    from ...hf.folder import read_config, stored_dtype
    from ..convert.hf_model import has_own_layers

    config = read_config(model)
    if config.get("model_type") == "bert":
        return [], ""
    is_chat, is_own = "loss_mask" in meta, has_own_layers(model)
    length = seq_length_of(meta, config)
    stored = _SECTIONS.get(stored_dtype(config))
    is_fast = host_gpus() > 0 or (stored == "bf16" and has_bf16_instructions())
    section = stored if is_fast else None
    devices, schedule = _pipeline(config, host_devices())
    save = checkpoints_of(output)
    common = {"hf_model": str(model), "data_path": str(output), "seq_length": length}
    jobs: dict[str, tuple[bool, float, dict[str, Any]]] = {FULL: (is_own, FULL_RATE, {"save": save})}
    if is_chat:
        jobs[LORA] = (False, LORA_RATE, {"save": f"{save}_lora", "lora_rank": RANK})
    commands = []
    for name, (packs, rate, keys) in jobs.items():
        samples, valid = _samples(output, is_chat, length, packs)
        steps = math.ceil(samples * (epochs or (EPOCHS_OF_CHAT if is_chat else EPOCHS_OF_TEXT)) / BATCH)
        train = {
            **common,
            "train_iters": steps,
            "eval_interval": math.ceil(samples / BATCH),
            "save_interval": math.ceil(samples / BATCH),
            "keep_checkpoints": 2,
            "eval_iters": min(MAX_EVAL_ITERS, math.ceil(valid / BATCH)),
            **keys,
        }
        path = output / name
        job = _job(section, length, schedule, devices, rate, steps, train)
        path.write_text(f"{json.dumps(job, indent=2)}\n", encoding="utf-8")
        commands.append(f"deepspeed --num_gpus {devices} train_gpt.py --deepspeed_config {path}")
    note = ""
    if section != stored:
        note = f"note: fp32, because {stored} is slow without a GPU here. With GPUs, add {_enabled(stored)}"
    return commands, note


def _enabled(section: str | None) -> str:
    return json.dumps({section: {"enabled": True}})[1:-1]


def _pipeline(config: Mapping[str, Any], available: int) -> tuple[int, str]:
    """Return the number of devices and the schedule, which has one copy of the weights."""
    counts = [config.get(key) for key in ("num_hidden_layers", "n_layer")]
    layers = next((count for count in counts if isinstance(count, int)), 8)
    devices = next((size for size in (4, 2) if size <= available and (size == 2 or layers >= 8)), 1)
    return devices, "zb_v" if devices > 1 and layers >= 2 * devices else "1f1b"


def _samples(output: Path, is_chat: bool, length: int, packs: bool) -> tuple[int, int]:
    """Return the samples of an epoch, and of validation; ``packs``: with several conversations in a sample."""
    from .blend import DEFAULT_SPLIT
    from .gpt import build_gpt_datasets, samples_per_epoch
    from .packing import DocumentOptions

    options = DocumentOptions(starts=is_chat and packs, packs=packs)
    train, valid, _ = build_gpt_datasets(str(output), DEFAULT_SPLIT, length, (0, 0, 0), 0, options)
    return samples_per_epoch(train) or 0, samples_per_epoch(valid) or 0


def _job(
    section: str | None,
    length: int,
    schedule: str,
    devices: int,
    rate: float,
    steps: int,
    train: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1 if length > TEXT_SEQ_LENGTH else 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        **({section: {"enabled": True}} if section else {}),
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": BUCKET_SIZE,
            "allgather_bucket_size": BUCKET_SIZE,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.0, "torch_adam": True},
        },
        "scheduler": {
            # With DeepSpeed's WarmupCosineLR, the first step has the rate 0.
            "type": "MegatronLR",
            "params": {
                "total_num_steps": steps,
                "decay_style": "cosine",
                "min_lr": float(f"{rate / 10:g}"),
                "warmup_num_steps": min(max(1, round(WARMUP * steps)), steps - 1),
                "warmup_init_lr": float(f"{rate / 10:g}"),
            },
        },
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": devices, "train": dict(train)},
    }
