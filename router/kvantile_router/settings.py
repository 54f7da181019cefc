"""How a gateway is set up, made once from the command line and passed on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from kvantile_optimizer.routing import QUEUE_LENGTH
from kvantile_router.fleet import Address

MIB = 2**20


class Settings(BaseModel):
    """Settings of one gateway. Durations are plan seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    plan: Path
    """The plan file."""
    replicas: tuple[Address, ...] = ()
    """Replicas given one by one; they stay whatever the file says."""
    replicas_file: Path | None = None
    """A file with more of them, followed while it changes."""
    host: str = "127.0.0.1"
    """Loopback, so that nothing is open to a network unasked."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """0 takes a free one."""
    queue_length: Annotated[int, Field(ge=0)] = QUEUE_LENGTH
    """Requests of one class that may wait."""
    queue_wait_s: Annotated[float, Field(ge=0)] | None = None
    """Longest wait; the class's target for the first token unless set, since after it the promise is broken."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 32 * MIB
    """A million tokens of text with room for pictures."""
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    """For a complete answer, where the class has none; long answers are legitimate, so none unless set."""
    api_keys: Path | None = None
    """A file of keys; everybody may come unless set."""
    replica_header: bool = True
    """Whether answers name their replica; clients outside may not learn addresses."""
    speed: Annotated[float, Field(gt=0)] = 1.0
    """Plan seconds per wall second."""
