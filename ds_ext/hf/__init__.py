"""Decoders of transformers as pipeline layers, with LoRA."""

from .export import save_adapter
from .specs import from_transformers

__all__ = ["from_transformers", "save_adapter"]
