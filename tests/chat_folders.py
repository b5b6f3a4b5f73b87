"""Tokenizer folders with chat templates in the shapes that models use, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

SPECIAL_TOKENS = (
    "<|endoftext|>",
    *("<|im_start|>", "<|im_end|>"),
    *("<s>", "</s>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|user|>", "<|assistant|>", "<|observation|>"),
)
_TURN = "{{- '<|im_start|>' + m.role + '\\n' }}"
_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_TEXT = "{{- m.content + '<|im_end|>\\n' }}"

TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "chatml": "{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
        "{%- for m in messages %}" + _TURN + _TEXT + "{%- endfor %}" + _PROMPT,
        "llama2": "{%- for m in messages %}"
        "{%- if m.role == 'user' %}{{- '<s>[INST] ' + m.content | trim + ' [/INST]' }}"
        "{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + ' </s>' }}"
        "{%- else %}{{- raise_exception('only user and assistant') }}{%- endif %}{%- endfor %}",
        "llama3": "{{- '<|begin_of_text|>' }}{%- for m in messages %}"
        "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
        "{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
        "generation": "{%- for m in messages %}" + _TURN + "{%- if m.role == 'assistant' %}"
        "{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
        "{%- else %}" + _TEXT + "{%- endif %}{%- endfor %}" + _PROMPT,
        # Only the turns after the last question keep their reasoning; a last turn without it gets an empty block.
        "qwen3": "{%- set ns = namespace(last=-1) %}"
        "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}" + _TURN + "{%- if m.role == 'assistant' %}"
        "{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') %}"
        "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n')"
        " if '</think>' in m.content else '' %}"
        "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
        "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}{{- answer + '<|im_end|>\\n' }}"
        "{%- else %}" + _TEXT + "{%- endif %}{%- endfor %}" + _PROMPT,
        # The prompt opens the reasoning, which rendered turns do not have.
        "r1": "{{- '<s>' }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
        "{{- '<|im_start|>' + m.content.split('</think>')[-1] + '</s>' }}{%- else %}{{- m.content }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|><think>\\n' }}{%- endif %}",
        # The end-of-sequence token ends conversations only.
        "phi3": "{%- for m in messages %}" + _TURN + _TEXT + "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- else %}{{- eos_token }}{%- endif %}",
        # The next role's token ends a turn.
        "glm": "{%- for m in messages %}{%- if m.role == 'tool' %}{{- '<|observation|>\n' + m.content }}"
        "{%- else %}{{- '<|' + m.role + '|>\n' + m.content }}"
        "{%- for c in m.tool_calls or [] %}{{- c.function.name + (c.function.arguments | tojson) }}{%- endfor %}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}",
        # The prompt opens the reasoning, which only the turns after the last question keep.
        "opened": "{%- set ns = namespace(last=-1) %}"
        "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}" + _TURN + "{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
        "{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}{{- m.content or '' }}"
        "{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{%- endfor %}"
        "{{- '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}",
        # No end-of-turn token, and a prompt that is not part of the rendered turns.
        "plain": "{%- for m in messages %}{{- m.role | upper + ': ' + m.content + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}",
    }
)


def write_tokenizer(folder: Path, template: str | None, vocab_size: int = 400) -> Path:
    """Train a byte-level BPE tokenizer on a few words and save it as a folder of transformers."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_words(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=template
    )
    fast.save_pretrained(str(folder))
    return folder


def _words() -> Iterator[str]:
    for number in range(50):
        yield f"user: what is {number}?\n\nassistant: it is the number {number}, and not {number + 1}.\n\n\n"
