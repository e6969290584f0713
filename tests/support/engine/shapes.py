"""Schemas for tests of structured output."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Town(Strict):
    name: Literal["Arlen", "Bruma", "Castel"]
    river: bool
    inhabitants: int = Field(ge=0, le=99_999)


class Part(Strict):
    kind: Literal["wheel", "door"]
    size: int | None = Field(ge=-9, le=99)


class Machine(Strict):
    parts: list[Part] = Field(min_length=1, max_length=3)
    main: Part
