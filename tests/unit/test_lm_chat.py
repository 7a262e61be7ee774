"""Conversations, and the answers in the text of a chat template."""

from __future__ import annotations

import gzip
import json

import pytest
import zstandard

from trainer.lm import chat, conversations, records
from trainer.lm.errors import RefusedError

# Like Qwen 2.5's: every message alike.
PLAIN = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
# Like Qwen 3's: only the last answer has its reasoning.
THINKING = """{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'assistant' -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- if loop.last -%}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1] if '</think>' in message.content else '' -%}
{%- set content = '<think>\\n' + thought.strip() + '\\n</think>\\n\\n' + content -%}
{%- endif -%}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
# Like Mistral's: the system message comes before the last question.
MOVING = """{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last -%}
[INST] {{ system + '\\n\\n' if message == last and system else '' }}{{ message.content }}[/INST]
{%- elif message.role == 'assistant' -%}
{{ ' ' + message.content + '</s>' }}
{%- endif -%}
{%- endfor -%}"""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def talk(*texts, system=None):
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return conversations.Conversation(
        [*first, *({"role": roles[number % 2], "content": text} for number, text in enumerate(texts))]
    )


def answers(template, conversation):
    rendered = chat.ChatTemplate(template, SPECIAL, "the template").render(conversation, "here")
    return [rendered.text[start:end] for start, end in rendered.answers], rendered.changed


def test_answers_are_what_follows_the_prompt_of_each():
    assert answers(PLAIN, talk("a", "b", "b", "b")) == (["b<|im_end|>\n", "b<|im_end|>\n"], 0)
    rendered = chat.ChatTemplate(PLAIN, {}, "it").render(talk("a", "b", "b", "b"), "here")
    assert rendered.answers[1][1] == len(rendered.text)
    assert rendered.text[rendered.answers[0][0] - 22 : rendered.answers[0][0]] == "<|im_start|>assistant\n"


def test_reasoning_is_part_of_the_last_answer_only():
    found = answers(THINKING, talk("a", "b", "c", "<think>why</think>\n\nd"))
    assert found == (["b<|im_end|>\n", "<think>\nwhy\n</think>\n\nd<|im_end|>\n"], 0)


def test_an_answer_that_the_template_changes_has_no_loss():
    found = answers(THINKING, talk("a", "<think>why</think>b", "c", "d"))
    assert found == (["<think>\n\n</think>\n\nd<|im_end|>\n"], 1)


def test_an_answer_whose_prompt_changes_later_has_no_loss():
    assert answers(MOVING, talk("a", "b", "c", "d", system="Be brief.")) == ([" d</s>"], 1)
    assert answers(MOVING, talk("a", "b", "c", "d")) == ([" b</s>", " d</s>"], 0)


def test_marks_of_the_template_come_first():
    marked = PLAIN.replace(
        "message.content + '<|im_end|>\\n' }}",
        "'' }}{% generation %}{{ message.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
    )
    assert answers(marked, talk("a", "b", "c", "d")) == (["a", "b", "c", "d"], 0)


@pytest.mark.parametrize("name", chat.BUILT_IN)
def test_built_in_template_marks_the_answers_and_their_end(name):
    found, _ = answers(chat.BUILT_IN[name], talk("a", "b\n", "c", "d", system="Be brief."))
    end = "<|im_end|>" if name == "chatml" else "</s>"
    assert found == ["b\n" + end, "d" + end]
    rendered = chat.ChatTemplate(chat.BUILT_IN[name], SPECIAL, name).render(talk("a", "b"), "here")
    assert chat.ChatTemplate(chat.BUILT_IN[name], SPECIAL, name).render(talk("a", "b"), "here") == rendered


def test_prompt_that_the_conversation_does_not_have_is_refused():
    odd = PLAIN.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>' }}")
    with pytest.raises(RefusedError, match="here: the template renders the conversation differently") as refused:
        answers(odd, talk("a", "b"))
    assert "generation" in refused.value.fix


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe|undefined"),
        ("{{ messages[7].content.x }}", "undefined|no element"),
        ("{{ messages + 1 }}", "list"),
        ("{% for a in range(10**9) %}x{% endfor %}", "range|too big"),
    ],
)
def test_template_that_fails_is_refused_with_the_record(template, says):
    with pytest.raises(RefusedError, match=says) as refused:
        answers(template, talk("a", "b"))
    assert str(refused.value).startswith("here: the template does not accept the conversation: ")


def test_invalid_template_is_refused():
    with pytest.raises(RefusedError, match="it is not a chat template"):
        chat.ChatTemplate("{% for %}", {}, "it")


def test_day_of_a_template_is_always_the_same():
    text = chat.ChatTemplate("{{ strftime_now('%d %b %Y') }}{% generation %}x{% endgeneration %}", {}, "it")
    assert text.render(talk("a", "b"), "here").text == "26 Jul 2024x"


def model(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_template_is_that_of_the_model(tmp_path):
    own = chat.load(model(tmp_path, chat_template=PLAIN, eos_token={"content": "</s>"}))
    assert (own.source, own.special) == (PLAIN, {"eos_token": "</s>"})
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": PLAIN}]
    assert chat.load(model(tmp_path, chat_template=several)).source == PLAIN
    (tmp_path / "chat_template.jinja").write_text(THINKING)
    assert chat.load(tmp_path).source == THINKING
    assert chat.load(tmp_path, "chatml").source == chat.BUILT_IN["chatml"]
    assert chat.load(tmp_path, str(tmp_path / "chat_template.jinja")).source == THINKING


def test_model_without_template_has_the_plain_one_and_needs_an_end(tmp_path):
    assert chat.load(model(tmp_path, eos_token="</s>")).source == chat.BUILT_IN["plain"]
    with pytest.raises(RefusedError, match="names none") as refused:
        chat.load(model(tmp_path))
    assert "chatml" in refused.value.fix


@pytest.mark.parametrize("text", ["[", "7", "[" * 100_000, "\x00"])
def test_invalid_configuration_of_a_tokenizer_is_refused(tmp_path, text):
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(RefusedError, match="tokenizer_config"):
        chat.load(tmp_path)


def test_unknown_template_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(RefusedError, match="cannot be read") as refused:
        chat.load(model(tmp_path), "qwen")
    assert "alpaca, chatml, plain" in refused.value.fix


def read(record):
    return conversations.read(record, "data.json: record 7")


def test_alpaca():
    record = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Count.", "history": [["a", "b"]]}
    assert read(record).messages == talk("a", "b", "Add.\n1 2", "3", system="Count.").messages
    assert read({"instruction": "Hi", "input": None, "output": "Ho"}).messages == talk("Hi", "Ho").messages


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "text", "value": "b"}, {"type": "text", "text": ""}]},
            ]
        },
    ],
)
def test_sharegpt_and_openai(record):
    assert read(record).messages == talk("a", "b").messages


def test_question_without_an_answer_is_dropped():
    turns = [{"from": who, "value": what} for who, what in (("human", "a"), ("gpt", "b"), ("human", "c"))]
    assert read({"system": "s", "conversations": turns}).messages == talk("a", "b", system="s").messages


def test_tools():
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    turns = [("human", "1+1"), ("function_call", call), ("observation", "2"), ("gpt", "Two.")]
    record = {"conversations": [{"from": who, "value": what} for who, what in turns], "tools": '[{"name": "add"}]'}
    found = read(record)
    assert found.tools == [{"type": "function", "function": {"name": "add"}}]
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_openai_tool_calls_have_their_arguments_as_an_object():
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    record = {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    }
    assert read(record).messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({}, "has none of the fields 'instruction', 'conversations', 'messages'; it has none"),
        ({"text": "a"}, "it has 'text'"),
        ({"instruction": "a"}, "has no field 'output'; it has 'instruction'"),
        ({"instruction": 7, "output": "b"}, "the field 'instruction' is a number, not a text"),
        ({"instruction": "a", "output": None}, "the field 'output' is null, not a text"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, r"history\[0\] is not a list of question and answer"),
        ({"instruction": "a", "output": "b", "history": 7}, "the field 'history' is not"),
        ({"messages": "a"}, "the field 'messages' is a text, not a list"),
        ({"messages": [7]}, r"messages\[0\] is a number, not an object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no field 'content'; it has 'role'"),
        ({"messages": [{"role": "king", "content": "x"}]}, r"messages\[0\]: the field 'role' is 'king', not one of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "the field 'content' has images, but this model only reads text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "the field 'content' has parts that are no text and no image",
        ),
        ({"image": "a.png", "conversations": []}, "the field 'image' has images, but this model only reads text"),
        ({"messages": []}, "has no answer"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "has no answer"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "the function call is not JSON"),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "no 'name' or no 'arguments'"),
        ({"instruction": "a", "output": "b", "tools": "{"}, "the field 'tools' is not JSON"),
        ({"instruction": "a", "output": "b", "tools": 7}, "the field 'tools' is a number"),
        ({"messages": [{"role": "user", "content": "x"}] * 5000}, "has 5000 messages, more than 4096"),
    ],
)
def test_wrong_record_is_refused_with_file_record_and_field(record, says):
    with pytest.raises(RefusedError, match=says) as refused:
        read(record)
    assert str(refused.value).startswith("data.json: record 7")
    assert len(str(refused.value)) < 400


def listed(path):
    return [(place, records.parse(item, place)) for group in records.groups(path) for place, item in group.places()]


def test_records_of_jsonl_and_json_have_their_places(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('\ufeff{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    assert listed(lines) == [(f"{lines}: line 1", {"a": 1}), (f"{lines}: line 3", {"a": 2})]
    for packed, pack in ((tmp_path / "b.jsonl.gz", gzip.compress), (tmp_path / "b.jsonl.zst", zstandard.compress)):
        packed.write_bytes(pack(lines.read_bytes()))
        assert listed(packed) == [(f"{packed}: line 1", {"a": 1}), (f"{packed}: line 3", {"a": 2})]
    whole = tmp_path / "a.json"
    whole.write_text(' [{"a": 1}, {"a": 2}]')
    assert listed(whole) == [(f"{whole}: record 1", {"a": 1}), (f"{whole}: record 2", {"a": 2})]


def test_groups_end_at_any_record(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "GROUP", 40)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"a": {number}}}\n' for number in range(100)))
    assert len(list(records.groups(path))) > 10
    assert [record["a"] for _, record in listed(path)] == list(range(100))
    assert [place.rpartition(" ")[2] for place, _ in listed(path)] == [str(number) for number in range(1, 101)]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl: line 2 is not JSON"),
        ("a.jsonl", b"7\n", "a.jsonl: line 1 is not a JSON object"),
        ("a.jsonl", b'{"a": 1}\n\xff\n', "a.jsonl: line 2 is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl: line 1 is not JSON"),
        ("a.json", b'[{"a": 1}, 7]', "a.json: record 2 is not a JSON object"),
        ("a.json", b'[{"a": 1}', "a.json is not JSON"),
        ("a.json", b"[" * 100_000, "a.json is not JSON"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be unpacked"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}', mtime=0)[:-9], "a.jsonl.gz cannot be unpacked"),
        ("a.jsonl.zst", b"no zstd", "a.jsonl.zst cannot be unpacked"),
    ],
)
def test_damaged_file_is_refused_with_its_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RefusedError, match=says):
        listed(tmp_path / name)


def test_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LINE", 1000)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 5000)
    with pytest.raises(RefusedError, match="line 1 has more than"):
        listed(tmp_path / "a.jsonl")


def test_files_of_a_folder(tmp_path):
    with pytest.raises(RefusedError, match="has no"):
        records.files_of(tmp_path)
    for name in ("b.jsonl", "a.json.gz", "c.txt"):
        (tmp_path / name).write_text("")
    assert [path.name for path in records.files_of(tmp_path)] == ["a.json.gz", "b.jsonl"]
    with pytest.raises(RefusedError, match="no such file"):
        records.files_of(tmp_path / "d.jsonl")
