"""What a checker has to say of one promise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise, and what is wrong with it and what that means (empty: it is kept).

    One that is no ``fault`` is a warning: it works, and may not be what is wanted.
    """

    promise: str
    wrong: str = ""
    fault: bool = True

    @property
    def broken(self) -> bool:
        return self.fault and bool(self.wrong)

    def __str__(self) -> str:
        how = "holds" if not self.wrong else "FAILS" if self.fault else "warns"
        return f"{how}  {self.promise}" + (f": {self.wrong}" if self.wrong else "")
