"""The page: one document with its style and its script inside, for the server and for a file alike.

Invariant: the document runs no script and loads nothing but what is written here. Its policy names the digests of
its own style and script, so even a text that became markup could not do anything.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from importlib import resources
from string import Template
from typing import Any

from trees.viewer.payload import dumps, plain

_SCRIPTS = (
    *("dom", "source", "windowed", "episodes", "model", "lanes", "messages"),
    *("drawing", "legend", "details", "opened", "main"),
)
"""In the order in which they are put together: all share one scope."""
_STYLES = ("colours", "theme", "episodes", "tree", "details")


def page(policy: str = "connect-src 'self'", data: str = "") -> str:
    """The document. ``policy``: what it may do beside showing itself; ``data``: markup with embedded trees."""
    style = "".join(asset(f"{name}.css") for name in _STYLES)
    script = '"use strict";\n(() => {\n' + "\n".join(asset(f"{name}.js") for name in _SCRIPTS) + "})();\n"
    return Template(asset("page.html")).substitute(
        policy=content_policy(style, script, policy),
        style=style,
        script=script,
        data=data,
    )


def standalone(rows: list[dict[str, Any]], about: dict[str, Any], trees: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The document with its data, in parts to be written one after the other.

    ``trees`` are in the order of ``rows``: each deflated by itself, so that the page opens only what is looked at.
    """
    gap = "<!-- trees -->"
    before, after = page(
        "connect-src 'none'", _block("rows", dumps({"rows": plain(rows), "about": about})) + gap
    ).split(gap)
    yield before
    for number, tree in enumerate(trees):
        packed = zlib.compress(dumps(tree).encode("ascii"))
        yield _block(f"tree-{number}", base64.b64encode(packed).decode("ascii"))
    yield after


def content_policy(style: str, script: str, also: str = "connect-src 'none'") -> str:
    """The policy of a document that may run this script, use this style, show images in it, and do nothing else."""
    return "; ".join(
        (
            *("default-src 'none'", f"script-src {_digest(script)}", f"style-src {_digest(style)}"),
            *("img-src data:", "base-uri 'none'", "form-action 'none'", also),
        )
    )


def _block(name: str, text: str) -> str:
    """A block of data; no text in it can end it, since no ``<`` is left."""
    return f'<script type="text/plain" id="{name}">{text.replace("<", chr(92) + "u003c")}</script>\n'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def asset(name: str) -> str:
    """A file of the page; ``colours.css`` is what other pages of a run share with it."""
    return (resources.files("trees.viewer") / "page" / name).read_text(encoding="utf-8")
