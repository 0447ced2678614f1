"""Elements of the page.

Invariant: no text becomes markup, since nothing is ever put together as a string; ``html`` escapes all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

Child = Element | str | None


def tag(name: str, *children: Child | Iterable[Child], **attributes: object) -> Element:
    """``tag("a", "text", href="#x", class_="row", data_step=3)``; an attribute that is None is left out."""
    element = Element(name)
    for key, value in attributes.items():
        if value is not None:
            element.set(key.rstrip("_").replace("_", "-") if key != "viewBox" else key, _said(value))
    for child in children:
        for one in [child] if child is None or isinstance(child, str | Element) else child:
            _append(element, one)
    return element


def html(element: Element) -> str:
    """The element as HTML."""
    return tostring(element, encoding="unicode", method="html")


def _append(element: Element, child: Child) -> None:
    if child is None:
        return
    if isinstance(child, Element):
        element.append(child)
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + child
    else:
        element.text = (element.text or "") + child


def _said(value: object) -> str:
    # Coordinates: a hundredth of a pixel is more than anyone sees.
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
