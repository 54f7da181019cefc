"""The files the gateway reads: the plan, the replicas, the keys; and how it notices that one has changed.

A file is looked at once a second and read when its time, inode or size differ. What cannot be read or understood
leaves in force what was read before and is told once, not once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Plan
from kvantile_router.fleet import Address

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Well inside the ten seconds within which a new plan must be in force; a stat a second costs nothing."""

Content = TypeVar("Content")
Url = Annotated[str, StringConstraints(pattern=r"^https?://[^/\s?#]+(/[^\s?#]*)?$", max_length=2048)]


class ReplicaEntry(BaseModel):
    """A replica in the replicas file."""

    model_config = ConfigDict(extra="forbid")

    group: Annotated[str, StringConstraints(min_length=1)]
    url: Url


class ReplicaList(BaseModel):
    """The replicas file."""

    model_config = ConfigDict(extra="ignore")

    replicas: list[ReplicaEntry]


def parse_plan(data: bytes) -> Plan:
    """The plan in a plan file. Raises InputError, one line per field."""
    try:
        return Plan.from_json(data)
    except ValidationError as error:
        raise InputError(_lines(error)) from error


def parse_replicas(data: bytes) -> list[Address]:
    """The replicas in a replicas file. Raises InputError."""
    try:
        entries = ReplicaList.model_validate_json(data).replicas
    except ValidationError as error:
        raise InputError(_lines(error)) from error
    return [Address(entry.group, entry.url.rstrip("/")) for entry in entries]


def parse_address(text: str) -> Address:
    """A replica given as GROUP=URL. Raises InputError."""
    group, _, url = text.partition("=")
    try:
        entry = ReplicaEntry(group=group, url=url)
    except ValidationError:
        raise InputError(f"--replica {text}: expected GROUP=URL, such as a100=http://127.0.0.1:8000") from None
    return Address(entry.group, entry.url.rstrip("/"))


def parse_keys(data: bytes) -> list[str]:
    """The keys in a key file, one a line. Raises InputError when there is none."""
    try:
        keys = [line.strip() for line in data.decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError("the file is not UTF-8 text") from error
    if not keys:
        raise InputError("the file has no key; expected one a line")
    return keys


def read(path: Path) -> bytes:
    """The file's content. Raises InputError, with the path."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


class FollowedFile(Generic[Content]):
    """A file whose content `parse` understands; `parse` raises InputError for what is no good."""

    def __init__(self, path: Path, parse: Callable[[bytes], Content]) -> None:
        self._path = path
        self._parse = parse
        self._seen: tuple[int, int, int] | None = None
        self._data: bytes | None = None
        self._told: str | None = None

    def load(self) -> Content:
        """Reads the file for the first time. Raises InputError, with the path."""
        self._seen = self._signature()
        data = read(self._path)
        content = parsed(self._path, data, self._parse)
        self._data = data
        return content

    def changed(self) -> Content | None:
        """The content if it has changed since it was last read and makes sense, else None."""
        signature = self._signature()
        if signature == self._seen and signature is not None:
            return None
        self._seen = signature
        try:
            data = read(self._path)
            content = None if data == self._data else parsed(self._path, data, self._parse)
        except InputError as error:
            self._tell(str(error))
            return None
        self._data, self._told = data, None
        return content

    async def follow(self, apply: Callable[[Content], None]) -> None:
        """Applies every change until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            content = self.changed()
            if content is not None:
                apply(content)

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    def _tell(self, message: str) -> None:
        if message != self._told:
            self._told = message
            log.error("changed file is ignored", extra={"error": message.replace("\n", "; ")})


def parsed(path: Path, data: bytes, parse: Callable[[bytes], Content]) -> Content:
    """What `parse` makes of the file's data. Raises InputError, each line with the path before it."""
    try:
        return parse(data)
    except InputError as error:
        raise InputError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error


def _lines(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).lstrip(".")
        lines.append(f"{where}: {item['msg']}" if where else item["msg"])
    return "\n".join(lines)
