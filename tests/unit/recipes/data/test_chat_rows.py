"""Rows of chat files: formats that become the same conversations, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ext.errors import ConfigError
from ds_ext.recipes.data.chat.rows import read_conversations
from ds_ext.recipes.data.chat.template import Conversation
from ds_ext.recipes.data.sources import hash_order

TURNS = [{"role": "user", "content": "what is 7?"}, {"role": "assistant", "content": "it is 7."}]
SYSTEM = {"role": "system", "content": "be brief"}
TOOLS = [{"type": "function", "function": {"name": "number"}}]
CALL = {"type": "function", "function": {"name": "number", "arguments": {"of": 7}}}


# Marks of other trainers, on an answer or on a row, that exclude text.
EXCLUDING: dict[str, Any] = {
    **{
        "loss_mask": 0,
        "step_loss_mask": 0,
        "no_loss": True,
        "loss": False,
        "lossWeight": 0.0,
        "train": "false",
    },
    **{
        "is_masked": True,
        "skip": 1,
        "ignored": True,
        "assistant_masks": [0, 1],
        "train_detail": [{"end": 3}],
    },
}


def marked(**marks: Any) -> dict[str, Any]:
    return {"messages": [TURNS[0], {**TURNS[1], **marks}]}


def read(folder: Path, *rows: Any) -> list[Conversation]:
    path = folder / "chat.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return list(read_conversations(path))


def sharegpt(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": sender, "value": value} for sender, value in turns]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": TURNS, "label": True, "rejected": None}, TURNS),
        ({"conversations": TURNS}, TURNS),
        ({"messages": TURNS, "system": "be brief"}, [SYSTEM, *TURNS]),
        ({"messages": TURNS, "system_prompt": "be brief", "system": ""}, [SYSTEM, *TURNS]),
        ({"messages": TURNS, "label": "news", "weight": 1.0, "preferred": "yes"}, TURNS),
        ({"messages": [{**TURNS[0], "tool_calls": None, "name": None}, {**TURNS[1], "weight": 1}]}, None),
        ({"conversations": sharegpt(("human", "what is 7?"), ("gpt", "it is 7."))}, TURNS),
        (
            {
                "system": "be brief",
                "conversations": sharegpt(("user", "what is 7?"), ("assistant", "it is 7.")),
            },
            [SYSTEM, *TURNS],
        ),
        ({"messages": TURNS, "loss_mask": [1, 1], "images": [], "no_loss": False, "train": "yes"}, TURNS),
        ({"messages": TURNS, "training_set": "v1", "train_steps": 100, "attention_mask": [1, 0]}, TURNS),
        ({"instruction": "what is 7?", "input": "", "output": "it is 7."}, TURNS),
        (
            {"instruction": "what is", "input": "8?", "output": "8", "history": [["what is 7?", "it is 7."]]},
            [*TURNS, {"role": "user", "content": "what is\n8?"}, {"role": "assistant", "content": "8"}],
        ),
    ],
)
def test_formats(tmp_path: Path, row: Any, messages: Any) -> None:
    (conversation,) = read(tmp_path, row)
    expected = messages or [TURNS[0], {**TURNS[1], "weight": 1}]
    assert (conversation.messages, conversation.tools) == (expected, None)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tool_calls(tmp_path: Path, tools: Any) -> None:
    """All three spellings of a call become one, with the arguments as they are."""
    as_string = {"name": "number", "arguments": json.dumps({"of": 7})}
    result = {"role": "tool", "content": "7"}
    messages = [
        TURNS[0],
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": as_string}]},
        result,
        {"role": "assistant", "content": "", "function_call": as_string},
        result,
        TURNS[1],
    ]
    calls = sharegpt(("function_call", json.dumps(as_string)), ("observation", "7"))
    ends = [sharegpt(("human", "what is 7?")), sharegpt(("gpt", "it is 7."))]
    rows = [{"messages": messages}, {"conversations": [*ends[0], *calls, *calls, *ends[1]]}]
    conversations = read(tmp_path, *({**row, "tools": tools} for row in rows))
    for conversation in conversations:
        assert conversation.tools == TOOLS
        assert [message["role"] for message in conversation.messages] == [m["role"] for m in messages]
        tool_calls = [call for message in conversation.messages for call in message.get("tool_calls", [])]
        assert [{key: call[key] for key in CALL} for call in tool_calls] == [
            {**CALL, "function": as_string}
        ] * 2
        assert not any("function_call" in message for message in conversation.messages)
        assert conversation.messages[2] == result
    (older,) = read(tmp_path, {**rows[0], "functions": [tool["function"] for tool in TOOLS]})
    assert (older.tools, older.messages) == (TOOLS, conversations[0].messages)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": TURNS, "label": False}, "label"),
        ({"messages": TURNS, "label": "rejected"}, "label"),
        ({"messages": TURNS, "kto_tag": "False"}, "kto_tag"),
        ({"messages": TURNS, "is_chosen": 0}, "is_chosen"),
        ({"messages": TURNS, "non_preferred_output": TURNS}, "non_preferred_output"),
        ({"messages": TURNS, "weight": 0}, "weight"),
        ({"messages": TURNS, "system": "be long", "system_prompt": "be brief"}, "system, system_prompt"),
        ({"messages": [TURNS[0], {**TURNS[1], "training": False}]}, "training"),
        ({"messages": [TURNS[0], {**TURNS[1], "loss_weight": 0.5}]}, "loss_weight"),
        ({"messages": [TURNS[0], {**TURNS[1], "masked": True}]}, "masked"),
        *((marked(**{key: value}), f"{key}: ") for key, value in EXCLUDING.items()),
        *(({"messages": TURNS, key: value}, f"{key}: ") for key, value in EXCLUDING.items()),
        (marked(content=[{"type": "text", "text": "a", "loss": 0}]), "loss: 0"),
        ({"messages": [{**TURNS[0], "train": True}, TURNS[1]]}, "train: True"),
        *(
            ({"messages": TURNS, key: ["a.png"]}, key)
            for key in ("images", "video", "audio_path", "pixelValues")
        ),
        ({"messages": [{**TURNS[0], "image": "a.png"}, TURNS[1]]}, "image"),
        ({"messages": [{**TURNS[0], "content": [{"type": "image_url", "url": "a"}]}, TURNS[1]]}, "image_url"),
        ({"messages": TURNS, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"messages": [TURNS[0], {**TURNS[1], "tool_calls": [CALL], "function_call": CALL}]}, "tool_calls"),
        ({"messages": TURNS, "functions": TOOLS, "tools": TOOLS}, "functions"),
        ({"messages": TURNS, "functions": ["number"]}, "functions"),
        ({"conversations": TURNS, "kto_tag": False}, "kto_tag"),
        ({"messages": TURNS, "rejected_response": "7"}, "rejected_response"),
        ({"chosen": TURNS, "rejected": TURNS}, "chosen"),
        ({"instruction": "a", "output": "b", "rejected": "c"}, "rejected"),
        ({"instruction": "a", "output": ["b", "c"]}, "'b'"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "'c'"),
        ({"messages": [TURNS[0], {**TURNS[1], "loss": False}]}, "loss"),
        ({"messages": [{"role": "user", "content": None}, TURNS[1]]}, "user"),
        ({"messages": [SYSTEM, *TURNS], "system": "be long"}, "system"),
        ({"conversations": sharegpt(("judge", "7"))}, "judge"),
        ({"conversations": sharegpt(("function_call", "number(7)"))}, "function_call"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": ["x"]}]}, "'x'"),
        ({"messages": TURNS, "tools": "number"}, "tools"),
        ({"prompt": "a", "completion": "b"}, "prompt, completion"),
        (["what is 7?"], "list"),
    ],
)
def test_refused_rows(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"line 2: .*{words}"):
        read(tmp_path, {"messages": TURNS}, row)


def test_marks_that_change_nothing(tmp_path: Path) -> None:
    """Marks are accepted on messages that are not trained."""
    for key in EXCLUDING.keys() - {"no_loss", "is_masked", "skip", "ignored"}:
        (conversation,) = read(tmp_path, {"messages": [{**TURNS[0], key: 0}, TURNS[1]]})
        assert conversation.unused == frozenset()


def test_nulls_of_files_with_columns(tmp_path: Path) -> None:
    """They are absent keys, as in trl, but not in a string with JSON. So are those of tools and of options."""
    calls = [
        {"id": None, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ({"city": "Rome", "unit": None, "in": [{"a": None}]}, '{"unit": null}', None)
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": None}}]
    row = {
        "messages": [{**TURNS[0], "name": None}, {"role": "assistant", "content": None, "tool_calls": calls}],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False, "date": None},
        "id": 7,
    }
    for options in (row["chat_template_kwargs"], json.dumps(row["chat_template_kwargs"])):
        (conversation,) = read(tmp_path, {**row, "chat_template_kwargs": options})
        question, answer = conversation.messages
        assert question == TURNS[0]
        assert [call["function"] for call in answer["tool_calls"]] == [
            {"name": "f", "arguments": {"city": "Rome", "in": [{}]}},
            {"name": "f", "arguments": '{"unit": null}'},
            {"name": "f"},
        ]
        assert conversation.tools == [{"type": "function", "function": {"name": "f"}}]
        assert (conversation.options, conversation.unused) == ({"enable_thinking": False}, {"id"})
    (conversation,) = read(tmp_path, {**row, "chat_template_kwargs": {"tools": TOOLS}})
    assert (conversation.tools, conversation.options) == (TOOLS, {})


def test_a_folder_of_shards(tmp_path: Path) -> None:
    names = ("b.jsonl", "a.jsonl", "c.json")
    for name in names:
        row = {"messages": [{"role": "user", "content": name}]}
        (tmp_path / name).write_text(json.dumps([row]) if name == "c.json" else json.dumps(row) + "\n")
    (tmp_path / "README.md").write_text("not rows")
    contents = [conversation.messages[0]["content"] for conversation in read_conversations(tmp_path)]
    assert contents == hash_order(names, str)
