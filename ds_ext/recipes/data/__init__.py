"""Training data: tokenizers, Megatron's ``.bin/.idx`` files, and samples for GPT and BERT."""
