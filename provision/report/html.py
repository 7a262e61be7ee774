"""One HTML file that may run and show only what is in it.

Its policy (Content-Security-Policy) names the digests of its own scripts and style, and no other source.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from provision.report.picture import escaped


def html_page(title: str, body: str, style: str, scripts: Sequence[str] = (), data: str = "") -> str:
    """The text of a page.

    Args:
        title: the title, as text.
        body: HTML.
        style: CSS.
        scripts: JavaScript, in the order in which it runs.
        data: HTML after the body and before the scripts.
    """
    allowed = " ".join(map(_digest, scripts)) or "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_digest(style)}; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escaped(title)}</title><style>{style}</style></head>\n<body>{body}\n{data}"
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body></html>\n"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
