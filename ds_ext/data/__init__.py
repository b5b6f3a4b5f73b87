"""Text to batches: tokenizers, Megatron `.bin/.idx` files, GPT samples, and the order of micro-batches."""
