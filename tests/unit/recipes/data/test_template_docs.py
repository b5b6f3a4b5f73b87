"""The chat templates of docs/data.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds_ext.errors import ConfigError
from tests.chat_folders import write_tokenizer
from tests.unit.recipes.data.test_prepare import run

pytest.importorskip("transformers")

PAGE = Path(__file__).parents[4] / "docs" / "data.md"
TOOLS = [
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
]


def test_the_changed_template_writes_tools_and_calls(tmp_path: Path) -> None:
    without, loop, tools = re.findall(r"```jinja\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    end = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    call = {"type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}
    messages = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "At noon."},
    ]
    source = tmp_path / "chat.jsonl"
    source.write_text(json.dumps({"messages": messages, "tools": TOOLS}) + "\n")

    def prepare(name: str, template: str) -> int:
        model = write_tokenizer(tmp_path / name, template)
        words = ["--format", "chat", "--source", source, "--tokenizer", model]
        return run(*words, "--output", tmp_path / f"data_{name}")

    for name, template in {"before": without, "loop": loop}.items():
        with pytest.raises(ConfigError):
            prepare(name, template + end)
    assert prepare("after", tools + loop + end) == 0
