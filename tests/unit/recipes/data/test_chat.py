"""Chat templates: which tokens are the assistant's, compared with the template's own text; `prepare --format chat`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ext.errors import ConfigError
from ds_ext.recipes.data.chat.template import ChatTemplate, Conversation, EncodedConversation, counted_tokens
from ds_ext.recipes.data.gpt import build_gpt_datasets
from ds_ext.recipes.data.indexed import IndexedTokens
from ds_ext.recipes.data.meta import check_tokenizer, read_meta
from ds_ext.recipes.data.packing import DocumentOptions
from ds_ext.recipes.data.tokenizer import load_tokenizer
from tests.chat_folders import TEMPLATES, write_tokenizer
from tests.unit.recipes.data.test_prepare import run

THOUGHT = "<think>\nhm\n</think>\n\n"
TWO_TURNS = [
    {"role": "user", "content": "what is 7?"},
    {"role": "assistant", "content": f"{THOUGHT}it is 7."},
    {"role": "user", "content": "and 8?"},
    {"role": "assistant", "content": "\n the é number  "},
]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        name: ChatTemplate(write_tokenizer(folder / name, template), 0)
        for name, template in TEMPLATES.items()
    }


def encode(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> EncodedConversation:
    (encoded,) = template.encode([Conversation(messages, tools, "chat.jsonl, line 3")])
    return encoded


def parts(template: ChatTemplate, encoded: EncodedConversation) -> list[tuple[bool, str]]:
    """Return the decoded runs of tokens that count and that do not."""
    pairs = zip(encoded.counted.tolist(), encoded.tokens, strict=True)
    return [
        (bool(counted), template._backend.decode([token for _, token in run]))
        for counted, run in groupby(pairs, key=lambda pair: pair[0])
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", [f"{THOUGHT}it is 7.<|im_end|>", "\n\n the é number  <|im_end|>"]),
        ("generation", [f"{THOUGHT}it is 7.<|im_end|>", "\n\n the é number  <|im_end|>"]),
        ("llama2", [f" {THOUGHT}it is 7. </s>", " the é number </s>"]),
        ("llama3", [f"{THOUGHT}it is 7.<|eot_id|>", "the é number<|eot_id|>"]),
        ("qwen3", ["it is 7.<|im_end|>", "<think>\n\n</think>\n\n the é number  <|im_end|>"]),
        ("r1", ["\n\nit is 7.</s>", "\n the é number  </s>"]),
        ("phi3", [f"{THOUGHT}it is 7.<|im_end|>", "\n\n the é number  <|im_end|>\n<|endoftext|>"]),
        ("plain", [f" {THOUGHT}it is 7.\n", " \n the é number  \n<|endoftext|>"]),
    ],
)
def test_the_assistants_text_and_its_end_count(
    templates: dict[str, ChatTemplate], name: str, expected: list[str]
) -> None:
    encoded = encode(templates[name], TWO_TURNS)
    runs = parts(templates[name], encoded)
    assert [text for counted, text in runs if counted] == expected
    text, _ = templates[name].render(Conversation(TWO_TURNS, None, "x"))
    ended = "".join(text for _, text in runs)
    assert ended in (text, text + "<|endoftext|>")
    # The text is tokenized once: the same ids as the library's, without a second begin-of-text token.
    expected_ids = templates[name]._backend.apply_chat_template(TWO_TURNS)["input_ids"]
    assert encoded.tokens[: len(expected_ids)] == expected_ids


@pytest.mark.parametrize("name", ["chatml", "generation", "qwen3", "llama3"])
@settings(deadline=None, max_examples=25)
@given(
    contents=st.lists(st.text("a ,é\n7", max_size=12), min_size=2, max_size=7),
    with_system=st.booleans(),
)
def test_masks_of_any_contents(
    templates: dict[str, ChatTemplate], name: str, contents: list[str], with_system: bool
) -> None:
    first = [{"role": "system", "content": "be brief"}] if with_system else []
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    template = templates[name]
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    runs = parts(template, encode(template, first + turns))
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    counted = [text for counts, text in runs if counts]
    assert [text.count(end) for text in counted] == [1] * len(answers)
    for answer, text in zip(answers, counted, strict=True):
        assert text.endswith(answer.strip() + end if name == "llama3" else answer.lstrip("\n") + end)
        assert text.removesuffix(end).removeprefix("<think>\n\n</think>\n\n").strip() == answer.strip()


def test_other_roles_never_count_and_tools_reach_the_template(templates: dict[str, ChatTemplate]) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is 7?"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "the number 7"},
        {"role": "assistant", "content": "it is 7."},
        {"role": "user", "content": "thanks"},
    ]
    tools = [{"type": "function", "function": {"name": "number"}}]
    runs = parts(templates["chatml"], encode(templates["chatml"], messages, tools))
    assert [text for counts, text in runs if counts] == ["call<|im_end|>", "it is 7.<|im_end|>"]
    assert json.dumps(tools) in runs[0][1]


def test_reasoning_that_later_messages_remove(templates: dict[str, ChatTemplate]) -> None:
    messages = [
        {"role": "user", "content": "what is 7?"},
        {"role": "assistant", "content": f"{THOUGHT}call"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": f"{THOUGHT}it is 7."},
    ]
    runs = parts(templates["qwen3"], encode(templates["qwen3"], messages))
    expected = [f"{THOUGHT}call<|im_end|>", f"{THOUGHT}it is 7.<|im_end|>"]
    assert [text for counts, text in runs if counts] == expected
    # The prompt for message 3 contains the reasoning of message 1, which the whole conversation does not.
    longer = [*messages, {"role": "user", "content": "and 8?"}]
    runs = parts(templates["qwen3"], encode(templates["qwen3"], longer))
    assert [text for counts, text in runs if counts] == ["call<|im_end|>", "it is 7.<|im_end|>"]
    # The template may write other parts of a message before its content.
    longer[3] = {**longer[3], "reasoning_content": "hm"}
    with pytest.raises(ConfigError, match=r"line 3.*\b3\b"):
        encode(templates["qwen3"], longer)


def test_conversations_without_a_prompt_or_against_the_template_are_refused(
    templates: dict[str, ChatTemplate],
) -> None:
    with pytest.raises(ConfigError, match="line 3"):
        encode(templates["chatml"], TWO_TURNS[1:])
    with pytest.raises(ConfigError, match=r"line 3.*only user and assistant"):
        encode(templates["llama2"], [{"role": "system", "content": "x"}, *TWO_TURNS])
    with pytest.raises(ConfigError, match="line 3"):
        encode(templates["chatml"], [{"role": "user"}])


def test_unknown_roles_are_refused(tmp_path: Path, templates: dict[str, ChatTemplate]) -> None:
    """Also by a template that writes any role, unless the template names it."""
    misspelled = [*TWO_TURNS[:3], {"role": "Assistant", "content": "8"}]
    with pytest.raises(ConfigError, match=r"line 3.*\b3\b.*'Assistant'"):
        encode(templates["chatml"], misspelled)
    critic = [TWO_TURNS[0], {"role": "critic", "content": "a number"}, *TWO_TURNS[1:2]]
    with pytest.raises(ConfigError, match=r"line 3.*\b1\b.*'critic'"):
        encode(templates["chatml"], critic)
    template = ChatTemplate(write_tokenizer(tmp_path, "{#- 'critic' #}" + TEMPLATES["chatml"]), 0)
    runs = parts(template, encode(template, critic))
    assert [text for counts, text in runs if counts] == [f"{THOUGHT}it is 7.<|im_end|>"]


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
@pytest.mark.parametrize("content", [[{"type": "text", "text": "what is 7?"}], {"text": "what is 7?"}])
def test_contents_other_than_text_are_refused(
    templates: dict[str, ChatTemplate], name: str, content: Any
) -> None:
    """Unless the template writes their text: ``trim`` would write a list as Python does, also after good turns."""
    encode(templates[name], TWO_TURNS)
    messages = [*TWO_TURNS[:2], {"role": "user", "content": content}, TWO_TURNS[3]]
    with pytest.raises(ConfigError, match=rf"line 3.* 2 .*{type(content).__name__}"):
        encode(templates[name], messages)


def test_an_object_is_no_list_of_parts(tmp_path: Path) -> None:
    """A template that joins the texts of parts would write nothing for an object."""
    text = "(m.content if m.content is string else m.content | map(attribute='text') | join) +"
    template = ChatTemplate(write_tokenizer(tmp_path, TEMPLATES["chatml"].replace("m.content +", text)), 0)
    parts_of_7 = [{"type": "text", "text": "what is"}, {"type": "text", "text": " 7?"}]
    expected = encode(template, TWO_TURNS).tokens
    assert encode(template, [{"role": "user", "content": parts_of_7}, *TWO_TURNS[1:]]).tokens == expected
    with pytest.raises(ConfigError, match=r"line 3.* 0 .*dict"):
        encode(template, [{"role": "user", "content": {"text": "what is 7?"}}, *TWO_TURNS[1:]])


def test_what_a_template_drops_is_refused(tmp_path: Path, templates: dict[str, ChatTemplate]) -> None:
    two_roles = (
        "{%- for m in messages %}{%- if m.role == 'user' %}{{- 'Q' + m.content + '<|im_end|>' }}"
        "{%- elif m.role == 'assistant' %}{{- 'A' + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'A' }}{%- endif %}"
    )
    template = ChatTemplate(write_tokenizer(tmp_path / "two", two_roles), 0)
    encode(template, TWO_TURNS)
    call = {"function": {"name": "number", "arguments": {}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    for index, message in (
        (0, {"role": "system", "content": "7"}),
        (2, {"role": "tool", "content": "7"}),
        (2, calls),
    ):
        with pytest.raises(ConfigError, match=rf"line 3.*\b{index}\b.*{message['role']}"):
            encode(template, [*TWO_TURNS[:index], message, *TWO_TURNS[index:]])
    with pytest.raises(ConfigError, match=r"line 3.*tools"):
        encode(template, TWO_TURNS, tools=[{"type": "function", "function": {"name": "number"}}])
    with pytest.raises(ConfigError, match=r"line 3.*\b2\b"):
        encode(templates["llama3"], [*TWO_TURNS[:2], {**calls, "content": "x"}, *TWO_TURNS[2:]])


def test_reasoning_that_a_template_drops_is_refused(
    tmp_path: Path, templates: dict[str, ChatTemplate]
) -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        encode(templates["chatml"], [*TWO_TURNS[:3], {**TWO_TURNS[3], key: ""}])
        with pytest.raises(ConfigError, match=rf"line 3.*\b3\b.*{key}"):
            encode(templates["chatml"], [*TWO_TURNS[:3], {**TWO_TURNS[3], key: "hm"}])
    # As in Qwen3's template, only the last turn has its reasoning.
    last = TEMPLATES["chatml"].replace(
        "{{- m.content", "{{- (m.reasoning_content or '') * loop.last + m.content"
    )
    template = ChatTemplate(write_tokenizer(tmp_path / "last", last), 0)
    answer = {**TWO_TURNS[1], "reasoning_content": "because"}
    for turns, count in (([TWO_TURNS[0], answer], 1), ([TWO_TURNS[0], answer, *TWO_TURNS[2:]], 0)):
        counted = [text for counts, text in parts(template, encode(template, turns)) if counts]
        assert "".join(counted).count("because") == count


def test_tool_calls_count(tmp_path: Path) -> None:
    chatml = TEMPLATES["chatml"].replace(
        "{{- m.content + '<|im_end|>\\n' }}",
        "{{- m.content or '' }}{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}",
    )
    template = ChatTemplate(write_tokenizer(tmp_path / "calls", chatml), 0)
    call = {"type": "function", "function": {"name": "number", "arguments": {"of": 7}}}
    messages = [TWO_TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    runs = parts(template, encode(template, messages))
    assert [text for counts, text in runs if counts] == [json.dumps(call["function"]) + "<|im_end|>"]


CALL = {"type": "function", "function": {"name": "number", "arguments": {"of": 7, "é": "x"}}}
WITH_TOOLS = [
    {"role": "user", "content": "what is 7?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "it is 7."},
    {"role": "user", "content": "and 8?"},
    {"role": "assistant", "content": "8"},
]


def token_ids(folder: Path) -> dict[str, int]:
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {token["content"]: token["id"] for token in tokens}


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_next_role_ends_a_turn(tmp_path: Path, block: bool, file: str) -> None:
    """All of ``eos_token_id`` end one, behind generation blocks too, and the end of a text gets one of them."""
    text = TEMPLATES["glm"]
    if block:
        text = text.replace(
            "+ m.content }}{%- for c", "}}{%- generation %}{{- m.content }}{%- for c"
        ).replace(
            "{%- endfor %}{%- endif %}{%- endfor %}",
            "{%- endfor %}{%- endgeneration %}{%- endif %}{%- endfor %}",
        )
        assert text.count("generation %}") == 2
        text = text.replace("{%- generation", "{%- if m.role == 'assistant' %}{%- generation", 1)
        text = text.replace(
            "{%- endgeneration %}", "{%- endgeneration %}{%- else %}{{- m.content }}{%- endif %}"
        )
    folder = write_tokenizer(tmp_path, text)
    call = "number" + json.dumps(CALL["function"]["arguments"], ensure_ascii=False)

    def counted(*stops: str) -> list[str]:
        ids = [token_ids(folder)[stop] for stop in stops]
        (folder / file).write_text(json.dumps({"eos_token_id": ids[0] if len(ids) == 1 else ids}))
        template = ChatTemplate(folder, 0)
        return [text for counts, text in parts(template, encode(template, WITH_TOOLS)) if counts]

    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    assert counted(*stops) == [f"{call}<|observation|>", "it is 7.<|user|>", "8<|endoftext|>"]
    assert counted("<|user|>") == [call, "it is 7.<|user|>", "8<|user|>"]
    assert counted("<|endoftext|>") == [call, "it is 7.", "8<|endoftext|>"]


def test_a_stop_token_after_an_end_of_turn_does_not_count(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, TEMPLATES["chatml"])
    ids = [token_ids(folder)[stop] for stop in ("<|im_end|>", "<|im_start|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    template = ChatTemplate(folder, 0)
    runs = parts(template, encode(template, TWO_TURNS))
    expected = [f"{THOUGHT}it is 7.<|im_end|>", "\n the é number  <|im_end|>"]
    assert [text.lstrip("\n") for counts, text in runs if counts] == [text.lstrip("\n") for text in expected]


def test_a_prompt_that_opens_the_reasoning(templates: dict[str, ChatTemplate]) -> None:
    """The answers after the last question count from the opened reasoning on, earlier ones as the template has them."""
    template = templates["opened"]

    def counted(messages: list[dict[str, Any]]) -> list[str]:
        return [text for counts, text in parts(template, encode(template, messages)) if counts]

    called = f"<tool_call>{json.dumps(CALL['function'], ensure_ascii=False)}</tool_call><|im_end|>"
    tools = [called, "it is 7.<|im_end|>"]
    assert counted(WITH_TOOLS) == [*tools, "\n</think>\n\n8<|im_end|>"]
    assert counted(WITH_TOOLS[:4]) == [f"\n</think>\n\n{text}" for text in tools]
    thoughtful = [{**m, "reasoning_content": "hm"} if m["role"] == "assistant" else m for m in WITH_TOOLS]
    assert counted(thoughtful) == [*tools, "hm\n</think>\n\n8<|im_end|>"]
    # An answer with both text and a call, equal answers, and an empty question.
    both = {**WITH_TOOLS[1], "content": "<t"}
    twice = [*WITH_TOOLS[:1], both, *WITH_TOOLS[2:4], {"role": "user", "content": ""}, *WITH_TOOLS[1:]]
    expected = [f"<t{called}", tools[1], *tools, "\n</think>\n\n8<|im_end|>"]
    assert counted(twice) == expected


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("arguments", "takes_text"),
    [
        ("c.function.arguments | tojson", False),
        ("'' if c.function.arguments is string else c.function.arguments.items() | list | tojson", False),
        ("c.function.name + c.function.arguments", True),
        ("c.function.arguments", True),
        ("c.function.arguments if c.function.arguments is string else ''", True),
    ],
)
def test_arguments_in_the_form_that_the_template_takes(
    tmp_path: Path, arguments: str, takes_text: bool, as_text: bool
) -> None:
    """Objects, or JSON strings as in the file. The text is that of transformers for this form."""
    chatml = TEMPLATES["chatml"].replace(
        "m.content +",
        f"m.content }}}}{{%- for c in m.tool_calls or [] %}}{{{{- c.function.name + '=' }}}}"
        f"{{{{- {arguments} }}}}{{%- endfor %}}{{{{- ",
    )
    template = ChatTemplate(write_tokenizer(tmp_path, chatml), 0)
    forms: dict[bool, Any] = {False: {"of": 7, "é": "x"}, True: '{"of":7,"é":"x"}'}

    def messages(form: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "number", "arguments": form}}
        return [*WITH_TOOLS[:1], {**WITH_TOOLS[1], "tool_calls": [call]}, *WITH_TOOLS[2:]]

    expected_form = (
        forms[takes_text]
        if as_text == takes_text or not takes_text
        else json.dumps(forms[False], ensure_ascii=False)
    )
    text, spans = template.render(Conversation(messages(forms[as_text]), None, "x"))
    assert text == template._backend.apply_chat_template(messages(expected_form), tokenize=False)
    assert len(spans) == 3 and text[slice(*spans[0])].startswith("number=")


def test_arguments_that_a_template_drops_are_refused(tmp_path: Path) -> None:
    chatml = TEMPLATES["chatml"].replace(
        "m.content +", "m.content }}{%- for c in m.tool_calls or [] %}{{- c.function.name }}{%- endfor %}{{- "
    )
    with pytest.raises(ConfigError, match=r"line 3.*\b1\b.*tool_calls"):
        encode(ChatTemplate(write_tokenizer(tmp_path, chatml), 0), WITH_TOOLS)


def test_options_of_a_row_reach_the_template(tmp_path: Path) -> None:
    """Variables, documents, tools and another template, as in trl. The prompt of an answer has them too."""
    text = "{%- if documents %}{{- documents | tojson }}{%- endif %}" + TEMPLATES["chatml"].replace(
        "assistant\\n' }}", "assistant\\n' }}{{- '<think></think>' if enable_thinking is false else '' }}"
    ).replace(
        "'\\n' }}{{- m.content",
        "'\\n' }}{{- '<think></think>' if enable_thinking is false and m.role == 'assistant' "
        "else '' }}{{- m.content",
    )
    template = ChatTemplate(write_tokenizer(tmp_path, text), 0)
    documents = [{"title": "a", "text": "b"}]
    other = TEMPLATES["chatml"].replace("<|im_end|>", "<|eot_id|>")
    turns = [TWO_TURNS[2], {"role": "assistant", "content": "8"}]
    for options in ({}, {"enable_thinking": False}, {"documents": documents}, {"chat_template": other}):
        rendered, ((start, stop),) = template.render(Conversation(turns, None, "x", options))
        assert rendered == template._backend.apply_chat_template(turns, tokenize=False, **options)
        assert rendered[start:stop] == "8<|eot_id|>" if "chat_template" in options else "8<|im_end|>"
    for options in ({"tokenize": True}, {"add_generation_prompt": True}, {"conversation": []}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            template.render(Conversation(turns, None, "x", options))


def test_generation_block_in_a_macro(tmp_path: Path) -> None:
    block = "{%- generation -%}  {{- m.content + '<|im_end|>' }}{%- endgeneration %}"
    turn = (
        "{%- macro turn(m) %}{{- '<|im_start|>' + m.role + '\\n' }}" + block + "{{- '\\n' }}{%- endmacro %}"
    )
    template = turn + "\n{%- for m in messages %}{{- turn(m) }}{%- endfor %}"
    loaded = ChatTemplate(write_tokenizer(tmp_path, template), 0)
    text, spans = loaded.render(Conversation(TWO_TURNS, None, "x"))
    assert text == loaded._backend.apply_chat_template(TWO_TURNS, tokenize=False)
    assert [text[start:stop] for start, stop in spans] == [m["content"] + "<|im_end|>" for m in TWO_TURNS]


def test_tokens_at_the_border_of_a_span() -> None:
    # Token 1 has one character of the first span. Token 2 excludes its leading space. Tokens 3 and 4 are bytes of one
    # character.
    offsets = np.array([[0, 2], [2, 5], [6, 7], [7, 8], [7, 8], [8, 8], [8, 9]])
    assert counted_tokens(offsets, [(4, 6)]).tolist() == [0, 1, 1, 0, 0, 0, 0]
    assert counted_tokens(offsets, [(7, 8)]).tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert counted_tokens(offsets, [(0, 1), (8, 9)]).tolist() == [1, 0, 0, 0, 0, 0, 1]
    assert counted_tokens(offsets, []).tolist() == [0] * 7


# --- prepare ---


def write_lines(path: Path, conversations: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(conversation)}\n" for conversation in conversations))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"what is {i}?"},
                {"role": "assistant", "content": "it is " * i, "score": 0.5 if i < 11 else None},
            ],
            "id": i,
        }
        for i in range(1, 30)
    ]
    question = {"messages": [{"role": "user", "content": "nothing?"}]}
    return write_lines(tmp_path / "chat.jsonl", [*chats, question])


def test_prepared_chat(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = write_tokenizer(tmp_path / "tokenizer", TEMPLATES["llama3"]), tmp_path / "out"
    words = ("--format", "chat", "--source", source, "--tokenizer", folder, "--output", output)
    assert run(*words) == 0
    printed = capsys.readouterr().out
    assert run(*words) == 0
    assert capsys.readouterr().out.splitlines()[1:] == printed.splitlines()[2:]

    meta = read_meta(str(output))
    assert meta is not None
    tokens, mask = IndexedTokens(output / "text_document"), IndexedTokens(output / meta["loss_mask"])
    assert np.array_equal(tokens.document_starts, mask.document_starts)
    assert (meta["documents"], meta["without_assistant"]) == (29, 1)
    assert meta["without_assistant_lines"] == [f"{source}, line 30"]
    assert f"{source}, line 30\n" in printed
    assert meta["tokens"] == len(tokens.tokens)
    assert meta["assistant_tokens"] == mask.tokens.sum()
    assert meta["max_token_id"] == tokens.tokens.max()
    assert meta["longer_than"] == {"512": 0}
    assert meta["ignored_keys"] == {"id": 29, "messages.score": 10}
    assert (
        "--seq-length 512 " in printed and sum("messages.score" in line for line in printed.splitlines()) == 1
    )
    check_tokenizer(str(output), load_tokenizer(folder))
    tokenizer = load_tokenizer(output)
    for number, (ids, counted) in enumerate((tokens.document(i), mask.document(i)) for i in range(29)):
        assert tokenizer.decode(ids[counted == 1].tolist()).strip() == ("it is " * (number + 1)).strip()
    train, _, _ = build_gpt_datasets(str(output), "1", 64, (5, 0, 0), 1, DocumentOptions(starts=True))
    assert train[0][1].shape == (64,)

    # The lines of the page print the first conversation.
    page = (Path(__file__).parents[4] / "docs" / "data.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "groupby" in block)
    exec(code.replace("data/chat", str(output)).replace("MODEL_FOLDER", str(folder)), {})
    shown = capsys.readouterr().out
    assert re.findall(r"\[(.*?)\]", shown) == ["it is<|eot_id|>"] and "what is 1?" in shown

    # The same folder is not taken for text with the same tokenizer, nor for another template.
    source.write_text(source.read_text().replace("messages", "text"))
    with pytest.raises(ConfigError, match="chat_template"):
        run("--source", source, "--tokenizer", folder, "--output", output)
    (output / "loss_mask.bin").unlink()
    with pytest.raises(ConfigError, match=r"line 1.*text"):
        run(*words)


def test_text_and_chat_have_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Data prepared by tokenizer.json alone does not fit a folder whose class splits texts differently."""
    folder = write_tokenizer(tmp_path / "tokenizer", TEMPLATES["chatml"])
    own = json.loads((folder / "tokenizer.json").read_text())
    number = "number 7 é."
    text = write_lines(tmp_path / "text.jsonl", [{"text": number}])
    chat = write_lines(tmp_path / "chat.jsonl", [{"messages": [{"role": "assistant", "content": number}]}])
    ids: dict[str, list[int]] = {}
    for name, tokenizer in (("own", folder / "tokenizer.json"), ("before", folder)):
        run("--source", text, "--tokenizer", tokenizer, "--output", tmp_path / name)
    for name in ("own", "before"):
        check_tokenizer(str(tmp_path / name), load_tokenizer(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    own["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(own))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    for name, words in (("text", ("--source", text)), ("chat", ("--format", "chat", "--source", chat))):
        run(*words, "--tokenizer", folder, "--output", tmp_path / name)
        check_tokenizer(str(tmp_path / name), load_tokenizer(folder))
        check_tokenizer(str(tmp_path / name), load_tokenizer(tmp_path / name))
        ids[name] = IndexedTokens(tmp_path / name / "text_document").document(0).tolist()
    assert ids["text"] == ids["chat"]
    for name in ("own", "before"):
        with pytest.raises(ConfigError, match="fingerprint"):
            check_tokenizer(str(tmp_path / name), load_tokenizer(folder))


def test_text_replaces_chat(source: Path, tmp_path: Path) -> None:
    folder, output = write_tokenizer(tmp_path / "tokenizer", TEMPLATES["chatml"]), tmp_path / "out"
    run("--format", "chat", "--source", source, "--tokenizer", folder, "--output", output)
    text = write_lines(tmp_path / "text.jsonl", [{"text": "what is 7?"}])
    run("--source", text, "--tokenizer", folder, "--output", output, "--force")
    assert not list(output.glob("loss_mask*"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "line 2"),
        ('{"text": "x"}', r"line 2.*text"),
        ('{"messages": []}', "line 2"),
        ('{"messages": [{"role": "user", "content": "x"}], "label": false}', r"line 2.*label"),
        ('{"messages": ["x"]}', "line 2"),
        ('{"messages": [{"content": "x"}]}', "line 2"),
        ('{"messages": [{"role": "assistant", "content": "x", "weight": 0}]}', r"line 2.*\b0\b"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "x"}', "line 2"),
    ],
)
def test_bad_lines_are_named(source: Path, tmp_path: Path, line: str, words: str) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", TEMPLATES["chatml"])
    source.write_text(source.read_text().splitlines()[0] + f"\n{line}\n")
    with pytest.raises(ConfigError, match=words):
        run("--format", "chat", "--source", source, "--tokenizer", folder, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_chat_needs_a_jsonl_file_and_a_tokenizer_with_a_template(source: Path, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", None)
    chat = ("--format", "chat", "--output", tmp_path / "out")
    for words, problem in (
        (("--source", source), "--tokenizer None"),
        (("--source", source, "--tokenizer", folder / "tokenizer.json"), r"tokenizer\.json"),
        (("--source", source, "--tokenizer", folder), "chat_template"),
        (("--source", "stdlib", "--tokenizer", folder), "stdlib"),
    ):
        with pytest.raises(ConfigError, match=problem):
            run(*chat, *words)
