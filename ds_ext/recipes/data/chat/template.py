"""Chat template of a Hugging Face tokenizer, and the tokens of the rendered text that are the assistant's.

The template itself marks the assistant's text with ``{% generation %}``, or the text of message i is found between the
prompt for it (messages 0..i-1 with ``add_generation_prompt``) and messages 0..i. Some templates render a message
differently once others follow: Qwen3 removes the reasoning of earlier turns. The prompts of others contain text that
the rendered turns lack: DeepSeek-R1 opens the reasoning. Then markers replace messages i-1 and i. Between them are the
end of one and the start of the other, which the prompt after message i-1 shares up to the assistant's first token. A
conversation for which this fails too is an error.

The rendered text is tokenized once. Offsets into the text map characters to tokens.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import ConfigError, Problems
from ..sources import located
from ..tokenizer import stop_ids, transformers_tokenizer

ASSISTANT = "assistant"
# Roles of any template. A template that writes every role would also write a misspelled one.
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython", "observation")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
COPY = "chat_template.jinja in a copy of the folder (docs/data.md#templates-without-tool-calls)"
MARKER = "\ue000\ue001\ue000"  # private-use characters, which templates pass unchanged
# Characters around the text of a generation block, written by a macro that replaces the block.
BEGIN, END, MACRO = "\ue002", "\ue003", "ds_ext_generation"
DEFINITION = f"{{% macro {MACRO}() %}}{BEGIN}{{{{ caller() }}}}{END}{{% endmacro %}}\n"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = dict[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class Conversation:
    """One line of a chat file.

    Attributes:
        messages: objects with a "role" and usually a "content".
        position: file and line, for errors.
        options: further arguments of apply_chat_template, such as enable_thinking.
        unused: keys of the row that this package does not use; "messages." and a key that only a template may use.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    position: str
    options: Mapping[str, Any] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EncodedConversation:
    """Tokens of a conversation.

    Attributes:
        counted: uint8 per token; 1: the token is the assistant's and counts in the loss.
        num_bytes: size of the rendered text.
    """

    tokens: list[int]
    counted: NDArray[np.uint8]
    num_bytes: int


class ChatTemplate:
    """Tokenizer with a chat template.

    ``fingerprint`` is 16 hex digits of the sha256 of the template, the end-of-sequence token and the stop tokens.
    """

    def __init__(self, folder: str | Path, eod_id: int) -> None:
        """Load a tokenizer folder of transformers.

        Args:
            folder: folder with ``tokenizer.json``, and a chat template in ``tokenizer_config.json`` or
                ``chat_template.jinja``.
            eod_id: token at the end of conversations whose text does not end with a special token, if the tokenizer
                has no end-of-sequence token.
        """
        self._backend = transformers_tokenizer(folder)
        if not self._backend.chat_template:
            raise ConfigError(
                f"--tokenizer: no chat template (got {folder}). Add chat_template.jinja to the folder, or "
                '"chat_template" to its tokenizer_config.json.'
            )
        # Shape of a conversation -> whether arguments of calls are JSON strings.
        self._takes_text: dict[object, bool] = {}
        # Conversations are truncated to seq_length when training starts.
        self._backend.model_max_length = 10**12
        added_tokens = self._backend.added_tokens_decoder
        self._special_tokens = tuple(token.content for token in added_tokens.values() if token.special)
        stops = [stop for stop in stop_ids(Path(folder)) if stop in added_tokens]
        self._stop_tokens = tuple(added_tokens[stop].content for stop in stops)
        end_id = self._backend.eos_token_id
        end_id = eod_id if end_id is None else end_id
        self._end_id: int = end_id if end_id in stops or not stops else stops[0]
        self._end_token: str = self._backend.eos_token or ""
        definition = repr((self._backend.chat_template, self._end_id, *self._stop_tokens))
        self.fingerprint = hashlib.sha256(definition.encode()).hexdigest()[:16]

    def encode(self, conversations: Sequence[Conversation]) -> list[EncodedConversation]:
        """Render and tokenize conversations.

        The end-of-turn token after the assistant's text counts as the assistant's. Behind a ``{% generation %}`` block,
        and if it is the next role's first token, it must be in ``eos_token_id`` of generation_config.json. A text that
        does not end with a special token gets the end-of-sequence token, so that the model learns to stop.
        """
        renderings = [self.render(conversation) for conversation in conversations]
        texts = [text for text, _ in renderings]
        batch = self._backend(texts, add_special_tokens=False, return_offsets_mapping=True)
        columns = zip(renderings, batch["input_ids"], batch["offset_mapping"], strict=True)
        return [self._mark_tokens(*rendering, ids, offsets) for rendering, ids, offsets in columns]

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the start and end of the assistant's parts of it."""
        with located(conversation.position):
            conversation = self._complete(conversation)
            template = self._template(conversation)
            if GENERATION.search(template):
                text, spans = self._render_marked(conversation, template)
            else:
                text = self._text(conversation)
                messages = enumerate(conversation.messages)
                answers = [index for index, message in messages if message["role"] == ASSISTANT]
                spans = [self._span(conversation, text, index) for index in answers]
            for index, content in enumerate(message.get("content") for message in conversation.messages):
                if isinstance(content, list | dict) and content and str(content) in text:
                    raise _no_text(conversation, index)
        return text, [self._with_stop(text, span) for span in spans]

    def ignored_keys(self, conversation: Conversation) -> list[str]:
        """Return the keys of a row that nothing uses. Those of messages may be named in the template."""
        return sorted(conversation.unused - _keys_in(self._template(conversation)))

    def _template(self, conversation: Conversation) -> str:
        return self._backend.get_chat_template(conversation.options.get("chat_template"), conversation.tools)

    def _complete(self, conversation: Conversation) -> Conversation:
        """Return a conversation with arguments of calls as the template takes them: objects, or else JSON strings.

        Roles, keys, their order and the types of contents decide what a template writes. Conversations that agree in
        these are tested once.
        """
        forms = [_with_arguments(conversation, as_text) for as_text in (False, True)]
        marked = (_with_markers(message, index) for index, message in enumerate(forms[0].messages))
        shape = (
            bool(conversation.tools),
            repr(conversation.options),
            *(
                (message["role"], type(message.get("content")), *message, *markers, *_reasoning_keys(message))
                for message, markers in marked
            ),
        )
        if shape not in self._takes_text:
            problems = Problems()
            for as_text in (True, False):  # objects are preferred
                with problems.collect():
                    self._require_complete(forms[as_text])
                    self._takes_text[shape] = as_text
            if shape not in self._takes_text:
                raise problems.errors[-1]
        return forms[self._takes_text[shape]]

    def _require_complete(self, conversation: Conversation) -> None:
        marked = [_with_markers(message, index) for index, message in enumerate(conversation.messages)]
        messages = [message for message, _ in marked]
        template = self._template(conversation)
        for index, role in enumerate(message["role"] for message in messages):
            if role not in ROLES and not any(quote + role + quote in template for quote in "'\""):
                raise ConfigError(
                    f"unknown role of message {index} (got {role!r}). Use one of {', '.join(ROLES)}, or a role that "
                    "the chat template names in quotes."
                )
        text = self._text(conversation, messages)
        for index, (message, markers) in enumerate(marked):
            # Python's way to write an object has single quotes.
            if any(marker not in text or f"'{marker}'" in text for marker in markers):
                if isinstance(message.get("content"), list | dict):
                    raise _no_text(conversation, index)
                dropped = "text or a function call" if message.get("content") else "the function call"
                raise ConfigError(
                    f"the chat template drops {dropped} of message {index} (got role {message['role']!r}, keys "
                    f"{', '.join(message)}). Change {COPY}."
                )
            for key in _reasoning_keys(message):  # templates may drop that of earlier messages
                marker = f"{MARKER}{key}"
                if marker not in self._text(conversation, [*messages[:index], {**message, key: marker}]):
                    raise ConfigError(
                        f"the chat template drops the reasoning of message {index} (got the key {key}). Remove it, or "
                        "use another template."
                    )
        if conversation.tools and text == self._text(conversation, messages, tools=None):
            raise ConfigError(
                f"the chat template drops the tools (got {len(conversation.tools)}). Remove them, or change {COPY}."
            )

    def _render_marked(self, conversation: Conversation, template: str) -> tuple[str, list[Span]]:
        """Return text and spans of a template with ``{% generation %}``, whose blocks become calls of a macro."""
        for tag, call in (("generation", f"call {MACRO}()"), ("endgeneration", "endcall")):
            template = re.sub(rf"(\{{%-?\s*){tag}(\s*-?%\}})", rf"\g<1>{call}\g<2>", template)
        marked = self._text(conversation, chat_template=DEFINITION + template)
        spans, text = [], ""
        for number, part in enumerate(re.split(f"[{BEGIN}{END}]", marked)):
            if number % 2:
                spans.append((len(text), len(text) + len(part)))
            text += part
        if text != self._text(conversation):
            raise ConfigError(
                f"the generation blocks of the chat template change its text (got {len(spans)} blocks). Do not nest "
                "them, and do not use private-use characters in messages."
            )
        return text, spans

    def _span(self, conversation: Conversation, text: str, index: int) -> Span:
        if index == 0:
            raise ConfigError(
                f"the first message is the assistant's, without a prompt (got role {ASSISTANT!r}). Start the "
                "conversation with a system or user message."
            )
        prompt = self._text(conversation, conversation.messages[:index], add_generation_prompt=True)
        prompt_and_answer = self._text(conversation, conversation.messages[: index + 1])
        if prompt_and_answer.startswith(prompt) and text.startswith(prompt_and_answer):
            start, stop = len(prompt), len(prompt_and_answer)
        else:
            start, stop = self._span_by_markers(conversation, text, index)
        answer = text[start:stop].rstrip()
        if answer.endswith(self._special_tokens):
            stop = start + len(answer)  # without whitespace after the end-of-turn token
        return start, stop

    def _span_by_markers(self, conversation: Conversation, text: str, index: int) -> Span:
        """Return start and end in ``text`` of message ``index``, found with markers in its place."""
        *earlier, previous, message = conversation.messages[: index + 1]
        later = conversation.messages[index + 1 :]
        marked_previous, previous_markers = _with_markers(previous, index - 1, replaces_all=True)
        message, markers = _with_markers(message, index, replaces_all=True)
        prompt = self._text(conversation, [*earlier, marked_previous], add_generation_prompt=True)
        both = self._text(conversation, [*earlier, marked_previous, message, *later])
        short = self._text(conversation, [*earlier, previous, message])
        full = self._text(conversation, [*earlier, previous, message, *later])
        head, following = _around(full, markers)
        _, turn_end = _around(short, markers)
        if not following.startswith(turn_end):
            turn_end = turn_end.removesuffix(self._end_token)  # at the end of the conversation only
        next_turns = following.removeprefix(turn_end)
        # Between the text of the previous message and that of this one, in the prompt and in the conversation.
        _, prompt_header = _around(prompt, previous_markers)
        header, _ = _around(_around(both, previous_markers)[1], markers)
        start, stop = len(head) - len(header), len(text) - len(next_turns)
        shared = prompt_header
        while not text.startswith(shared, start) or not (
            shared == prompt_header or header.startswith(shared)
        ):
            shared = shared[:-1]
        start += len(shared)
        if (
            max(map(full.count, markers)) == 1
            and head.endswith(header)
            and text.startswith(head[:start])
            and following.startswith(turn_end)
            and text[stop:] == next_turns
            and (message.get("tool_calls") or text[start:stop].endswith(turn_end.lstrip()))
        ):
            return start, stop
        raise ConfigError(
            f"the tokens of the assistant's message {index} cannot be identified, because the chat template renders it "
            f"differently among other messages (got {len(conversation.messages)} messages). Split the conversation "
            "after this message, or mark the assistant's text in the template with {% generation %}."
        )

    def _with_stop(self, text: str, span: Span) -> Span:
        """Return a span with the stop token after it, such as the next role's first token in the format of GLM."""
        start, stop = span
        rest = text[stop:].lstrip()
        if text[start:stop].rstrip().endswith(self._stop_tokens) or not rest.startswith(self._stop_tokens):
            return span
        token = next(token for token in self._stop_tokens if rest.startswith(token))
        return start, len(text) - len(rest) + len(token)

    def _text(
        self,
        conversation: Conversation,
        messages: list[Message] | None = None,
        add_generation_prompt: bool = False,
        **changes: Any,
    ) -> str:
        """Return the text of messages (default: all). ``changes`` are options of apply_chat_template."""
        options = {"tools": conversation.tools, **conversation.options, **changes}
        try:
            return self._backend.apply_chat_template(
                conversation.messages if messages is None else messages,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **options,
            )
        except Exception as error:  # a template is a program
            raise _rejection(conversation, error) from error

    def _mark_tokens(
        self, text: str, spans: list[Span], ids: list[int], offsets: list[Span]
    ) -> EncodedConversation:
        """Return the tokens of a text with the assistant's ``spans``. ``offsets`` are start and end of every token.

        A text that ends without a special token gets the end-of-sequence token, which counts if the assistant's text
        is the last.
        """
        counted = counted_tokens(np.array(offsets, dtype=np.int64).reshape(-1, 2), spans)
        visible = text.rstrip()
        if not visible.endswith(self._special_tokens):
            ends_with_assistant = bool(spans) and spans[-1][1] >= len(visible)
            ids = [*ids, self._end_id]
            counted = np.append(counted, np.uint8(ends_with_assistant))
        return EncodedConversation(ids, counted, len(text.encode()))


@lru_cache(10)
def _keys_in(template: str) -> frozenset[str]:
    return frozenset(f"messages.{word}" for word in re.findall(r"\w+", template))


def _with_functions(message: Message, change: Callable[[Message], Message]) -> Message:
    """Return a message with ``change`` applied to the function of each call."""
    calls = [{**call, "function": change(call["function"])} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else message


def _with_arguments(conversation: Conversation, as_text: bool) -> Conversation:
    """Return a conversation whose calls have their arguments as JSON strings, or as objects."""

    def convert(function: Message) -> Message:
        arguments = function.get("arguments", "")
        if isinstance(arguments, str) == as_text or arguments == "":
            return function
        arguments = json.dumps(arguments, ensure_ascii=False) if as_text else json.loads(arguments)
        return {**function, "arguments": arguments}

    messages = [_with_functions(message, convert) for message in conversation.messages]
    return replace(conversation, messages=messages)


def _with_markers(message: Message, index: int, replaces_all: bool = False) -> tuple[Message, list[str]]:
    """Replace texts of a message, and names and arguments of its calls, by markers; also return the markers.

    ``replaces_all``: also the reasoning, and a content that is empty, because templates write no text before it.
    """
    markers: list[str] = []

    def mark(node: Message, key: str) -> Message:
        value = node.get(key)
        if not value or not isinstance(value, str | dict):
            return node
        markers.append(f"{MARKER}{index}.{len(markers)}{MARKER}")
        if isinstance(value, str) and key != "arguments":
            return {**node, key: markers[-1]}
        marked: Any = {markers[-1]: 0}
        return {**node, key: json.dumps(marked, ensure_ascii=False) if isinstance(value, str) else marked}

    if isinstance(message.get("content"), list):
        parts = [mark(part, "text") if isinstance(part, dict) else part for part in message["content"]]
        message = {**message, "content": parts}
    else:
        message = mark(message, "content")
    if replaces_all:
        for key in [*_reasoning_keys(message), *(() if message.get("content") else ("content",))]:
            markers.append(f"{MARKER}{index}.{key}{MARKER}")
            message = {**message, key: markers[-1]}
    return _with_functions(message, lambda function: mark(mark(function, "name"), "arguments")), markers


def _around(text: str, markers: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first marker and after the last one; all of the text without a marker."""
    parts = re.split("|".join(map(re.escape, markers)), text)
    return parts[0], parts[-1]


def _reasoning_keys(message: Message) -> list[str]:
    return [key for key in REASONING_KEYS if message.get(key)]


def counted_tokens(offsets_N2: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.uint8]:
    """Return 1 for each token that contains a character of a span, else 0.

    Some tokenizers exclude spaces from a token's offsets. Therefore a token starts at the end of the previous one.
    """
    starts, stops = offsets_N2[:, 0], offsets_N2[:, 1]
    starts = np.minimum(starts, np.concatenate(([0], np.maximum.accumulate(stops)))[:-1])
    counted = np.zeros(len(offsets_N2), dtype=np.uint8)
    for start, stop in spans:
        counted |= (starts < stop) & (stops > start)
    return counted


def _no_text(conversation: Conversation, index: int, problem: str = "") -> ConfigError:
    kind = type(conversation.messages[index]["content"]).__name__
    return ConfigError(
        f"the chat template needs a text as content of message {index} (got {kind}{problem}). Write a string."
    )


def _rejection(conversation: Conversation, error: Exception) -> ConfigError:
    problem = f"{type(error).__name__}: {error}"
    if type(error).__name__ in ("TypeError", "UndefinedError"):
        for index, message in enumerate(conversation.messages):
            if not isinstance(message.get("content") or "", str):
                return _no_text(conversation, index, f"; {problem}")
    return ConfigError(
        f"the chat template rejects the conversation (got {problem}). Change the template if it is at fault, or change "
        "or remove this line."
    )
