"""A page around its body.

Invariant: it loads nothing and runs no script but its own, which its policy names by digest; it is the same page with
and without a network.
"""

from __future__ import annotations

from html import escape
from importlib import resources
from xml.etree.ElementTree import Element

from algos.reporting.markup import html
from trees.viewer.page import asset, content_policy

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
"""


def sheet(title: str, body: Element, script: str = "") -> str:
    """The document. ``script`` is the name of a script of this package's pages; empty: none."""
    style = asset("colours.css") + _own("report.css")
    code = '"use strict";\n(() => {\n' + _own(script) + "})();\n" if script else ""
    head = _HEAD.format(policy=escape(content_policy(style, code)), title=escape(title), style=style)
    # The script stands outside of the elements, where nothing is escaped.
    last = f"<script>{code}</script>\n" if script else ""
    return head + html(body).removesuffix("</body>") + f"{last}</body>\n</html>\n"


def _own(name: str) -> str:
    return (resources.files("algos.reporting") / "page" / name).read_text(encoding="utf-8")
