"""Turns conversations into text with a model's chat template, and finds the answers in it.

The template is the model folder's: ``chat_template.jinja``, or ``chat_template`` in ``tokenizer_config.json``. A model
without one, such as a base model, gets a template of ``BUILT_IN``. It is rendered as transformers does it, in a
sandbox, but ``strftime_now`` always returns the same day: samples must not depend on the day.

The loss is on answers only. A template may mark them with ``{% generation %}``. Otherwise an answer is what follows
the prompt that the model sees when it is asked for this answer:

1. The start is the end of the messages before it, rendered with ``add_generation_prompt``.
2. The end is the end of the messages up to it. Templates such as Qwen3's render an answer differently when more
   messages follow. There the answer's text, followed by what ends a turn, must stand at the start.

An answer that the template changes has no loss. That happens to the earlier answers of reasoning models, whose
templates remove the reasoning. If the last answer of a conversation cannot be found, the record is refused.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from trainer.lm.conversations import Conversation, text_of
from trainer.lm.errors import RefusedError

DAY = dt.datetime(2024, 7, 26, tzinfo=dt.timezone.utc)  # the day that Llama 3's template names by default
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATE = 1 << 20  # characters of a template, at most
TEXT = 1 << 26  # characters of a rendered conversation, at most

_ALPACA = """\
{%- if messages[0].role == 'system' -%}
{{ messages[0].content }}{% set rest = messages[1:] %}
{%- else -%}
Below is an instruction that describes a task. Write a response that appropriately completes the request.

{% set rest = messages %}
{%- endif -%}
{%- for message in rest -%}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + eos_token }}{% endgeneration %}{{ '\\n\\n' }}
{%- else -%}
### Instruction:
{{ message.content }}

### Response:
{% endif -%}
{%- endfor -%}"""
_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{ message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
_PLAIN = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ 'Assistant:' }}{% generation %}{{ message.content + eos_token }}{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{ {'system': 'System: ', 'user': 'Human: '}.get(message.role, 'Tool: ') + message.content + eos_token + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}"""
BUILT_IN = {"alpaca": _ALPACA, "chatml": _CHATML, "plain": _PLAIN}
DEFAULT = "plain"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the start and end of each answer. ``changed`` counts the answers without loss."""

    text: str
    answers: Sequence[Tuple[int, int]]
    changed: int = 0


class ChatTemplate:
    """A chat template with the special tokens of its model. ``where`` names it in messages."""

    def __init__(self, source: str, special: Dict[str, str], where: str) -> None:
        self.where = where
        self.source, self.special = source, special
        self.digest = hashlib.sha256(json.dumps([source, sorted(special.items())]).encode()).hexdigest()[:16]
        self._tracker: List[Tuple[int, int]] = []
        if len(source) > TEMPLATE:
            raise RefusedError("%s has more than %d characters" % (where, TEMPLATE))
        self._template, self._errors = _compiled(source, where)
        self._marks = "endgeneration" in source

    def render(self, conversation: Conversation, place: str) -> Rendered:
        """Return the text of a conversation and its answers. ``place`` names the record in messages.

        Raises:
            RefusedError: the template does not accept the conversation, or its last answer cannot be found.
        """
        if self._marks:
            pieces: List[str] = []
            answers: List[Tuple[int, int]] = []
            text = self._rendered(conversation, place, marked=(pieces, answers))
            if not answers:
                raise RefusedError("%s: %s marks no answer with {%% generation %%}" % (place, self.where))
            return Rendered(text, answers)
        return self._compared(conversation, place)

    def _compared(self, conversation: Conversation, place: str) -> Rendered:
        messages, tools = conversation.messages, conversation.tools
        text = self._rendered(conversation, place)
        answers: List[Tuple[int, int]] = []
        changed = 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            is_last = number == len(messages) - 1
            prompt = self._rendered(Conversation(messages[:number], tools), place, asks=True)
            turn = text if is_last else self._rendered(Conversation(messages[: number + 1], tools), place)
            answer = _located(text, prompt, turn, text_of(message["content"]))
            if answer:
                answers.append(answer)
            elif is_last:
                raise RefusedError(
                    "%s: %s renders the conversation differently from the prompt of its last answer, so the answer"
                    " cannot be found" % (place, self.where),
                    "mark answers with {% generation %} in the template, or use --template chatml",
                )
            else:
                changed += 1
        return Rendered(text, answers, changed)

    def _rendered(self, conversation: Conversation, place: str, asks: bool = False, marked: Any = None) -> str:
        tracker = self._template.environment.tracker
        tracker.begin(*(marked or (None, None)))
        context = {"messages": conversation.messages, "tools": conversation.tools, "documents": None}
        pieces: List[str] = marked[0] if marked else []
        length = 0
        try:
            for piece in self._template.generate(add_generation_prompt=asks, **context, **self.special):
                pieces.append(piece)
                length += len(piece)
                if length > TEXT:
                    raise RefusedError("%s: the conversation has more than %d characters" % (place, TEXT))
        except self._errors as error:
            what = "%s: %s does not accept the conversation: %s" % (place, self.where, _short(error))
            raise RefusedError(what, "change the record, or leave such records out with --skip-wrong") from error
        return "".join(pieces)


def _located(text: str, prompt: str, turn: str, content: str) -> Optional[Tuple[int, int]]:
    """Return the start and the end of an answer in the text of its conversation."""
    start = len(prompt)
    if not text.startswith(prompt):
        return None
    if text.startswith(turn) and len(turn) > start:
        return start, len(turn)
    content = content.strip()
    place = turn.rfind(content) if content else -1
    closing = turn[place + len(content) :]  # what ends a turn
    if place < 0 or not closing or not text.startswith(content + closing, start):
        return None
    return start, start + len(content) + len(closing)


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:300]


def _compiled(source: str, where: str) -> Tuple[Any, Tuple[Any, ...]]:
    """Return a jinja template, and the errors that rendering it may raise."""
    try:
        import jinja2  # noqa: PLC0415 - only for conversations
        import jinja2.ext  # noqa: PLC0415
        import jinja2.nodes  # noqa: PLC0415
        import jinja2.sandbox  # noqa: PLC0415
    except ImportError as error:
        raise RefusedError("the package jinja2 is not installed", "pip install jinja2") from error

    class Tracker(jinja2.ext.Extension):
        """Records the places of {% generation %} blocks."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's interface

        def __init__(self, environment: Any) -> None:
            super().__init__(environment)
            environment.tracker = self
            self.begin(None, None)

        def begin(self, pieces: Optional[List[str]], found: Optional[List[Tuple[int, int]]]) -> None:
            self._pieces, self._found = pieces, found

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            answer = str(caller())
            if self._pieces is not None and self._found is not None:
                start = sum(map(len, self._pieces))
                self._found.append((start, start + len(answer)))
            return answer

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Optional[int] = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Tracker, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=DAY.strftime)
    # range() of the sandbox stops at 100,000; nothing else of a template is unbounded but nested loops over messages.
    errors = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError)
    try:
        return environment.from_string(source), errors
    except (jinja2.TemplateError, RecursionError) as error:
        raise RefusedError("%s is not a chat template: %s" % (where, _short(error))) from error


def load(folder: Optional[Path], named: str = "") -> ChatTemplate:
    """Return the template of a model folder, or the one that ``--template`` names: a file, or one of BUILT_IN.

    Raises:
        RefusedError: the template or the tokenizer's configuration cannot be read.
    """
    config = _object(folder / "tokenizer_config.json") if folder else {}
    special = _special(config, _object(folder / "special_tokens_map.json") if folder else {})
    if named and named not in BUILT_IN:
        return ChatTemplate(_text(Path(named)), special, named)
    source, where = (BUILT_IN[named], "the template %s" % named) if named else _own(folder, config)
    if not source:
        source, where = BUILT_IN[DEFAULT], "the template %s" % DEFAULT
    if source in (_ALPACA, _PLAIN) and not special.get("eos_token"):
        what = "%s ends answers with the tokenizer's eos_token, but %s names none"
        raise RefusedError(what % (where, (folder or Path()) / "tokenizer_config.json"), "add it, or --template chatml")
    return ChatTemplate(source, special, where)


def _own(folder: Optional[Path], config: Dict[str, Any]) -> Tuple[str, str]:
    if folder and (folder / "chat_template.jinja").is_file():
        return _text(folder / "chat_template.jinja"), str(folder / "chat_template.jinja")
    found = config.get("chat_template") or ""
    if isinstance(found, list):  # several templates, each with a name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default") or ""
    where = "the chat_template of %s" % (folder / "tokenizer_config.json" if folder else "")
    if not isinstance(found, str):
        raise RefusedError("%s is not a text" % where)
    return found, where


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(sorted(BUILT_IN))
        what = "the template %s cannot be read: %s" % (path, error)
        raise RefusedError(what, "--template FILE, or one of %s" % names) from error


def _object(path: Path) -> Dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError("%s cannot be read: %s" % (path, error), "copy it from the model again") from error
    if not isinstance(found, dict):
        raise RefusedError("%s is not a JSON object" % path, "copy it from the model again")
    return found


def _special(config: Dict[str, Any], older: Dict[str, Any]) -> Dict[str, str]:
    special = {}
    for name in SPECIAL:
        value = config.get(name) or older.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[name] = value
    return special


def encode(tokenizer: Any, rendered: Sequence[Rendered]) -> List[Tuple[List[int], List[Tuple[int, int]]]]:
    """Return the tokens of conversations, and the first and the last + 1 of each answer's.

    A text is encoded in one piece, as transformers does it. A token with characters of a prompt and of an answer is one
    of the answer's.
    """
    encodings = tokenizer.encode_batch([each.text for each in rendered], add_special_tokens=False)
    return [
        (encoding.ids, [_tokens(encoding, *answer) for answer in each.answers])
        for encoding, each in zip(encodings, rendered)  # noqa: B905 - Python 3.9 has no strict
    ]


def _tokens(encoding: Any, start: int, end: int) -> Tuple[int, int]:
    """Return the tokens that have a character of a span."""
    first, last = None, None
    while start < end and first is None:
        first = encoding.char_to_token(start)
        start += 1
    while start <= end and last is None:
        last = encoding.char_to_token(end - 1)
        end -= 1
    return (0, 0) if first is None or last is None else (first, last + 1)
