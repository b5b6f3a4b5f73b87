"""Chat data: conversations rendered by a tokenizer's chat template, with the loss on the assistant's tokens."""
