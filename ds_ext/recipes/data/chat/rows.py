"""Rows of chat files as conversations: ``messages`` as in OpenAI's API, ShareGPT's and Alpaca's keys.

Rows that mark bad answers, as in data for DPO and KTO, are refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ....errors import ConfigError
from ..sources import read_rows, row_files
from .template import ASSISTANT, Conversation

FORMATS = (
    '{"messages": [{"role": "user", "content": ...}, ...]}, {"conversations": [{"from": "human", "value": ...}, ...]} '
    'or {"instruction": ..., "input": ..., "output": ...}'
)
FUNCTION_CALL = "function_call"
# ShareGPT's sender -> role.
SENDERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("human", "user"), "user"),
        **dict.fromkeys(("gpt", "chatgpt", ASSISTANT, FUNCTION_CALL), ASSISTANT),
        **dict.fromkeys(("observation", "tool"), "tool"),
        "system": "system",
    }
)
SYSTEM_KEYS = ("system", "system_prompt", "system_message")
PREFERENCE_KEYS = (
    *("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_output"),
    *("preferred_output", "non_preferred_output"),
)
LABEL_KEYS = ("label", "kto_tag", "preferred", "is_preferred", "is_chosen")
BAD_LABELS = ("false", "0", "0.0", "-1", "no", "bad", "rejected", "negative", "undesirable")  # of answers
ROW_WEIGHT_KEYS = ("weight", "loss_weight", "sample_weight")
# Of a message: weights that must be 1, and marks that exclude it.
WEIGHT_KEYS = (
    *("weight", "loss", "loss_scale", "loss_weight", "train", "training", "trainable"),
    *("train_detail", "training_detail", "train_on_turn"),
)
MASK_KEYS = ("mask", "masked", "ignore")


def read_conversations(source: Path) -> Iterator[Conversation]:
    """Return the conversations of a file, or of all files with rows in a folder. Iterating raises ConfigError."""
    return (_conversation(row, position) for path in row_files(source) for position, row in read_rows(path))


def _conversation(row: Any, position: str) -> Conversation:
    """Return the conversation of a row. ``position`` is its file and line, for errors. Raises ConfigError."""
    if not isinstance(row, dict):
        raise ConfigError(f"{position}: not a conversation (got {type(row).__name__}). Write {FORMATS}.")
    _require_targets(row, position)
    messages = [_message(message, position) for message in _messages(row, position)]
    prompts = {key: row[key] for key in SYSTEM_KEYS if row.get(key)}
    if prompts:
        if len(prompts) > 1 or messages[0]["role"] == "system":
            others = " and a first message" if messages[0]["role"] == "system" else ""
            raise ConfigError(
                f"{position}: two system prompts (got {', '.join(prompts)}{others}). Remove one."
            )
        messages.insert(0, {"role": "system", "content": next(iter(prompts.values()))})
    return Conversation(messages, _tools(row, position), position)


def _tools(row: Mapping[str, Any], position: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row, which OpenAI's older key lists as ``functions``. Raises ConfigError."""
    tools: list[dict[str, Any]] = []
    for key in ("tools", "functions"):
        values = row.get(key) or []
        if isinstance(values, str):
            values = _parsed(values, key, position) or []
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise ConfigError(
                f"{position}: {key!r} must be a list of objects (got {values!r}). Remove the key."
            )
        if values and tools:
            raise ConfigError(f"{position}: two lists of tools (got 'tools' and 'functions'). Remove one.")
        tools = tools or (
            values if key == "tools" else [{"type": "function", "function": value} for value in values]
        )
    return tools or None


def _require_targets(row: Mapping[str, Any], position: str) -> None:
    """Raise ConfigError for a row with answers that a model should avoid."""
    problem = next((f"the key {key}" for key in PREFERENCE_KEYS if row.get(key) is not None), None)
    labels = {key: row[key] for key in LABEL_KEYS if str(row.get(key)).strip().lower() in BAD_LABELS}
    problem = problem or next((f"{key}: {value!r}" for key, value in labels.items()), None)
    if problem is not None:
        raise ConfigError(
            f"{position}: training would not avoid the rejected answers of preference data (got {problem}). Keep the "
            "good answers only, as 'messages' without this key."
        )
    _require_full_weight(row, ROW_WEIGHT_KEYS, (), position)


def _require_full_weight(
    node: Mapping[str, Any], weight_keys: Sequence[str], mask_keys: Sequence[str], position: str
) -> None:
    """Raise ConfigError for a row or a message whose loss has a weight other than 1, or a mask other than 0."""
    for keys, neutral in ((weight_keys, 1), (mask_keys, 0)):
        for key in keys:
            if node.get(key) not in (None, neutral):
                raise ConfigError(
                    f"{position}: weights are not supported (got {key}: {node[key]!r}). Remove the key, or what must "
                    "not be trained."
                )


def _messages(row: Mapping[str, Any], position: str) -> list[Any]:
    """Return the messages of a row, of which those of ShareGPT have the keys ``from`` and ``value``."""
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), list) and row[key]:
            return row[key]
    if "instruction" in row and "output" in row:
        question = [part for part in (row["instruction"], row.get("input")) if part]
        history = row.get("history") or []
        texts = [*question, row["output"], *(text for turn in history for text in turn)]
        if not all(isinstance(text, str) for text in texts) or any(len(turn) != 2 for turn in history):
            raise ConfigError(
                f"{position}: the parts of a conversation must be strings (got {texts!r}). Write {FORMATS}."
            )
        return [
            {"role": role, "content": text}
            for turn in (*history, ("\n".join(question), row["output"]))
            for role, text in zip(("user", ASSISTANT), turn, strict=True)
        ]
    raise ConfigError(f"{position}: no conversation (got the keys {', '.join(row)}). Write {FORMATS}.")


def _message(message: Any, position: str) -> dict[str, Any]:
    """Return a message with role, content and tool calls, whose arguments are objects. Raises ConfigError."""
    if isinstance(message, dict) and "from" in message:
        message = _from_sharegpt(message, position)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(
            f"{position}: a message without a role (got {message!r}). Write "
            '{"role": "user" or "assistant", "content": ...}.'
        )
    _require_full_weight(message, WEIGHT_KEYS, MASK_KEYS, position)
    # Templates test whether a key exists; files with columns write all keys.
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    calls = message.get("tool_calls", [])
    if FUNCTION_CALL in message:  # OpenAI's older key
        if calls:
            raise ConfigError(
                f"{position}: calls of functions under two keys (got {FUNCTION_CALL} and tool_calls). Remove one."
            )
        calls = [message.pop(FUNCTION_CALL)]
    if calls:
        message["tool_calls"] = [_call(call, position) for call in calls]
    elif message.get("content", "") is None:
        raise ConfigError(
            f"{position}: a message without content (got role {message['role']!r}). Write text, or remove it."
        )
    return message


def _from_sharegpt(message: dict[str, Any], position: str) -> dict[str, Any]:
    """Return a message with role and content; a call of functions becomes tool calls. Raises ConfigError."""
    sender, value = message["from"], message.get("value")
    if sender not in SENDERS:
        raise ConfigError(
            f"{position}: unknown sender (got from: {sender!r}). Use one of {', '.join(SENDERS)}."
        )
    others = {key: other for key, other in message.items() if key not in ("from", "value")}
    if sender != FUNCTION_CALL:
        return {**others, "role": SENDERS[sender], "content": value}
    calls = _parsed(value, FUNCTION_CALL, position)
    calls = calls if isinstance(calls, list) else [calls]
    return {**others, "role": ASSISTANT, "content": "", "tool_calls": calls}


def _call(call: Any, position: str) -> dict[str, Any]:
    """Return a tool call with a function whose arguments are an object, as templates expect. Raises ConfigError."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{position}: a tool call without the name of a function (got {call!r}). Write "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}.'
        )
    if isinstance(function.get("arguments"), str):
        function = {**function, "arguments": _parsed(function["arguments"], "arguments", position)}
    others = call if "function" in call else {}
    return {"type": "function", **others, "function": function}


def _parsed(text: Any, key: str, position: str) -> Any:
    """Return the value of a string with JSON. Raises ConfigError."""
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{position}: {key!r} is not JSON (got {text!r}: {error}). Correct it.") from None
