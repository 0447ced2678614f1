"""The words that names and contents of desk tasks are made of.

Invariant: no word is a part of another word, of a command that the experts use, or of an
instruction, so that a search for one word never finds another.
"""

from __future__ import annotations

WORDS: tuple[str, ...] = (
    "amber", "anchor", "apple", "arrow", "autumn", "badge", "barley", "basil", "beacon", "birch",
    "bottle", "breeze", "bridge", "butter", "candle", "canyon", "carbon", "cedar", "cherry", "cobalt",
    "copper", "coral", "cotton", "desert", "dragon", "ember", "falcon", "fennel", "forest", "garden",
    "ginger", "glacier", "harbor", "hazel", "island", "ivory", "jasmine", "kettle", "lantern", "lemon",
    "linen", "magnet", "maple", "meadow", "mirror", "nickel", "ocean", "olive", "orchid", "pepper",
    "planet", "quartz", "raven", "river", "saddle", "silver", "timber", "velvet", "walnut", "willow",
)  # fmt: skip

EXTENSIONS: tuple[str, ...] = ("txt", "md", "log", "csv")
