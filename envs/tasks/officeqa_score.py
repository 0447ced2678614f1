"""Scores one answer to an OfficeQA question, by the rules of the scorer that its authors publish.

The answer is the last ``<FINAL_ANSWER>`` of the message, else the whole message. It must be an answer and nothing
else: one line, as many numbers as are expected (years beside them do not count), no markup. Numbers agree within a
relative tolerance where their units (thousand, million, ...) do not contradict each other; ``(5)`` and ``\u2212 5`` are
negative, currency signs and thousands commas mean nothing; a list in brackets is compared in order; words beside a
number (``March 1977``) must be there too. A text agrees when it is the same but for case, quotes and parentheses.

Runs alone, as the grader of a task: ``answer.json`` beside it holds ``answer`` and ``tolerance``.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 250
_AROUND = 20
_CURRENCY = "$£€¥₹¢₩₽"
_AMOUNT = r"\d{1,3}(?:,\d{3})*(?:\.\d+)?|\d+(?:\.\d+)?"
_ACCOUNTING = re.compile(rf"\(\s*([{_CURRENCY}])?\s*({_AMOUNT})\s*\)")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)")
_NUMBER = re.compile(r"-?\d+\.?\d*%?")
_ITEM = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?%?")
_BRACKETS = re.compile(r"\[([^\[\]]+)\]")
_FINAL = re.compile(r"<FINAL_ANSWER>\s*(.*?)\s*</FINAL_ANSWER>", re.DOTALL | re.IGNORECASE)
_UNITS = {
    "trillion": re.compile(r"\btrillions?\b"),
    "billion": re.compile(r"\b(?:billions?|b)\b"),
    "million": re.compile(r"\b(?:millions?|m)\b"),
    "thousand": re.compile(r"\b(?:thousands?|k)\b"),
}
_UNIT_WORDS = re.compile(r"\b(?:(?:trillion|billion|million|thousand|hundred)s?|percent|percentage|%)\b")


@dataclass(frozen=True)
class Number:
    value: float
    unit: str = ""

    @property
    def year(self) -> bool:
        return 1900 <= self.value <= 2100 and self.value == int(self.value)

    def agrees(self, other: Number, tolerance: float) -> bool:
        """Whether ``other`` is this expected number."""
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if self.value == 0:
            return other.value == 0
        return abs(self.value - other.value) / abs(self.value) <= tolerance


def score(expected: str, message: str, tolerance: float = 0.0) -> float:
    """1 or 0. ``tolerance`` is relative to the expected number."""
    found = _FINAL.findall(message)
    given = (found[-1] if found else message).strip()
    if not given or len(given) > _LONGEST or sum(bool(line.strip()) for line in given.splitlines()) > 1:
        return 0.0
    if "unable to determine" in given.lower():
        return 0.0
    wanted = numbers(expected)
    if not wanted:
        return float(not numbers(given) and _plain(expected) == _plain(given))
    return float(_numbers_agree(expected, wanted, given, tolerance))


def _numbers_agree(expected: str, wanted: list[Number], given: str, tolerance: float) -> bool:
    offered = numbers(given)
    if _ignores_years(expected, wanted):
        offered = [number for number in offered if not number.year]
    in_order = _is_list(expected, wanted)
    lists = _segmented(given, len(wanted)) if in_order else []
    if len(offered) != len(wanted) and not lists:
        return False
    if re.search(r"<[^>]*>", given):
        return False
    if in_order:
        candidates = [*([Number(value) for value in values] for values in lists), offered]
        return any(_in_order(wanted, candidate, tolerance) for candidate in candidates)
    words = _words_agree(expected, given)
    return words and all(any(one.agrees(other, tolerance) for other in offered) for one in wanted)


def _in_order(wanted: list[Number], offered: list[Number], tolerance: float) -> bool:
    return len(wanted) == len(offered) and all(
        one.agrees(other, tolerance) for one, other in zip(wanted, offered, strict=True)
    )


def _ignores_years(expected: str, wanted: list[Number]) -> bool:
    """Whether a year in the answer is only a mention: none is expected."""
    if any(number.year for number in wanted):
        return False
    return len(wanted) > 1 or len(_words(expected)) < 2


def numbers(text: str) -> list[Number]:
    """The numbers of a text, each with the unit that stands near it."""
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), _unaccounted(_normal(text)))
    found = []
    for match in _NUMBER.finditer(text):
        near = text[max(0, match.start() - _AROUND) : match.end() + _AROUND].lower()
        unit = next((name for name, words in _UNITS.items() if words.search(near)), "")
        found.append(Number(float(match[0].rstrip("%")), unit))
    return found


def _normal(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("\u2212", "-")).strip()


def _unaccounted(text: str) -> str:
    """Parentheses around an amount as a minus sign (but not around a year), and no currency signs."""

    def sign(match: re.Match[str]) -> str:
        mention = match[1] is None and Number(float(match[2].replace(",", ""))).year
        return match[0] if mention else f"-{match[2]}"

    return re.sub(f"[{_CURRENCY}]", "", _ACCOUNTING.sub(sign, text))


def _list_body(text: str) -> str | None:
    """What stands in the text's one pair of brackets; None where there is another number outside of it."""
    text = _normal(text)
    found = list(_BRACKETS.finditer(text))
    if len(found) != 1 or re.search(r"\d", text[: found[0].start()] + text[found[0].end() :]):
        return None
    return found[0][1]


def _is_list(expected: str, wanted: list[Number]) -> bool:
    body = _list_body(expected)
    if body is None or len(wanted) < 2:
        return False
    return [number.value for number in wanted] in _segmented(body, len(wanted))


def _segmented(text: str, count: int) -> list[list[float]]:
    """Every way to read the text as ``count`` numbers with commas between: ``8,152,260`` is 8 and 152260, or 3."""
    if count < 2:
        return []
    chunks = (_list_body(text) or _normal(text)).split(",")
    ways: dict[int, list[list[float]]] = {0: [[]]}
    for taken in range(count):
        further: dict[int, list[list[float]]] = {}
        for start, before in ways.items():
            for end in range(start + 1, len(chunks) - (count - taken - 1) + 1):
                value = _item(",".join(chunks[start:end]))
                if value is not None:
                    further.setdefault(end, []).extend([*way, value] for way in before)
        ways = further
    return ways.get(len(chunks), [])


def _item(text: str) -> float | None:
    text = text.strip()
    if not text or re.search(r"\s,|,\s", text):
        return None
    text = _unaccounted(_normal(text))
    return float(text.rstrip("%").replace(",", "")) if _ITEM.fullmatch(text) else None


def _words(text: str) -> str:
    """What of a text is neither number nor unit nor punctuation."""
    text = _NUMBER.sub("", _normal(text).lower()).replace(",", "")
    return re.sub(r"\s+", " ", re.sub(r"[^\w\s]", " ", _UNIT_WORDS.sub("", text))).strip()


def _words_agree(expected: str, given: str) -> bool:
    wanted, offered = _words(expected), _words(given)
    if len(wanted) < 2:
        return True
    return len(offered) >= 2 and (wanted in offered or offered in wanted)


def _plain(text: str) -> str:
    text = text.strip().lower().strip('"').strip("'")
    return re.sub(r"\s+", " ", re.sub(r"\([^)]*\)", "", text).strip())


if __name__ == "__main__":
    asked = json.loads(Path(__file__).with_name("answer.json").read_text(encoding="utf-8"))
    said = Path(os.environ["REINS_FINAL_MESSAGE"]).read_text(encoding="utf-8")
    print(score(asked["answer"], said, asked["tolerance"]))
