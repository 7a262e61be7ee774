"""Renders the jinja2 templates in ``templates/``. ``quote`` is the only function that quotes values for sh.

In a template whose name ends in ``.sh.j2``, every ``{{ expression }}`` becomes one quoted word of sh. The filter
``{{ expression | raw }}`` marks text that is already sh (a rendered fragment, a macro's output), and
``{{ list | words }}`` becomes one quoted word per item. Any operation on raw text makes it a plain value again. So a
missing ``raw`` is visible in the script, but never an injection.

A quoted word must be where sh expects a word: never inside quotes, in a comment or in an unquoted heredoc.
``tests/unit/test_render.py`` checks this in every template.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jinja2 import Environment
    from jinja2.runtime import Context

_HERE = Path(__file__).resolve().parent
_PLACES = (_HERE / "templates", _HERE.parent / "templates")  # in a wheel; in a checkout
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@%+:,./-]+")  # without '=': a word in command position must not be an assignment


class _Raw(str):
    """Text that is already sh."""

    __slots__ = ()


def render(template: str, /, **values: object) -> str:
    """The text of ``templates/<template>`` with ``values`` filled in.

    Args:
        template: path below ``templates/``, such as ``"hosts/block.j2"``; ``*.sh.j2`` quotes every value for sh.
        values: the template's variables; a missing one is an error.

    Raises:
        ClusterctlError: the template or a variable does not exist, or a value cannot be quoted.
    """
    from jinja2 import TemplateError, TemplateNotFound  # noqa: PLC0415 - see template_environment

    try:
        return template_environment().get_template(template).render(values)
    except TemplateNotFound as error:
        raise ClusterctlError(f"template {error.name or template} does not exist") from error
    except (TemplateError, ClusterctlError) as error:
        raise ClusterctlError(f"template {template}: {error}") from error


def template_text(template: str) -> str:
    """The text of a file below ``templates/`` as it is."""
    environment = template_environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, template)[0]


def quote(value: object) -> str:
    r"""Quote a string, a path or a number as one word of sh.

    Newlines, non-ASCII text and ``surrogateescape`` bytes are kept; encode the script with that error handler.

    >>> quote("it's")
    "'it'\\''s'"

    Raises:
        ClusterctlError: the text contains a NUL byte, or ``value`` has another type.
    """
    if isinstance(value, bool) or not isinstance(value, str | PurePath | int | float):
        raise ClusterctlError(f"{value!r} is not a text, path or number: it cannot become a word of sh")
    text = str(value)
    if "\0" in text:
        raise ClusterctlError(f"{text!r} contains a NUL byte, which is impossible in sh")
    if _PLAIN_WORD.fullmatch(text):
        return text
    return "'" + text.replace("'", "'\\''") + "'"


def words(values: Iterable[object]) -> str:
    """Quote each of ``values`` as a word of sh, separated by spaces."""
    if isinstance(values, str):
        raise ClusterctlError(f"{values!r} is one text, not a list of words")
    return _Raw(" ".join(quote(value) for value in values))


@cache
def template_environment() -> Environment:
    """The environment of the templates in ``templates/``, made once."""
    # Imported with the first template. Every command needs quote and words, which do not use jinja2.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context  # noqa: PLC0415
    from jinja2.runtime import Undefined  # noqa: PLC0415

    def raw(value: object) -> str:
        if isinstance(value, Undefined):
            str(value)  # raises, and names the variable
        if not isinstance(value, str):
            raise ClusterctlError(f"{value!r} is marked as raw sh but is not text")
        return _Raw(value)

    @pass_context
    def finalize(context: Context, value: object) -> object:
        # With pass_context this runs only at render time and knows the expression's file, so an included template is
        # quoted by its own name. The template's text itself never gets here.
        if isinstance(value, _Raw | Undefined) or not (context.name or "").endswith(".sh.j2"):
            return value
        return quote(value)

    environment = Environment(
        loader=FileSystemLoader([place for place in _PLACES if place.is_dir()]),
        undefined=StrictUndefined,
        finalize=finalize,
        autoescape=False,  # noqa: S701 - nothing here is HTML; sh is quoted by finalize
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(raw=raw, words=words, quote=quote)
    return environment
