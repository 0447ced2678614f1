"""What all settings share: an unknown key is an error, every key has a meaning in one line."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def _device(value: str) -> str:
    if not DEVICE.fullmatch(value):
        raise ValueError(f"got {value!r}, expected cpu, cuda or cuda:N")
    return value


Device = Annotated[str, AfterValidator(_device)]
"""Where a model computes, as torch names it."""


class Config(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, validate_default=True, allow_inf_nan=False)
