"""The cost log: measurements that survive the process, in SQLite.

In:  a Key, which holds everything that could change a cost.
Out: the Measurement under it.

Several processes may use one log at a time: SQLite serialises the writers, readers see whole rows.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from placement.errors import CostLogError
from placement.measuring.protocol import Measurement

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Key:
    """What determines a cost."""

    segment: str
    """Hash of the structure: operations, attributes, shapes, dtypes, strides, which inputs are constant."""
    backend: str
    version: str
    """The backend's `version_key`."""
    threads: int
    machine: str
    clock: str
    """`wall` or `cpu`, see Protocol."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the log."""

    key: Key
    measurement: Measurement
    title: str
    """The segment for people."""
    time: float
    """When it was written, in seconds since 1970."""


def default_path() -> Path:
    """`PLACEMENT_LOG`, or `coexec/placement.sqlite` in the user's cache directory."""
    named = os.environ.get("PLACEMENT_LOG")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coexec" / "placement.sqlite"


class CostLog:
    """A cost log in a file, or in memory (path None)."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        try:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path or ":memory:", timeout=60, isolation_level=None)
            self._connection.execute("PRAGMA busy_timeout = 60000")
            if self.path is not None:
                self._connection.execute("PRAGMA journal_mode = WAL")
            self._create()
        except (sqlite3.Error, OSError) as error:
            raise CostLogError(
                f"{self.path} cannot be used as a cost log: {error}. Name another file, or delete this one."
            ) from error

    def _create(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise CostLogError(
                f"{self.path} has version {version}; this coexec reads {SCHEMA_VERSION}. Delete it."
            )
        keys = ", ".join(
            f"{f.name} {'INTEGER' if f.name == 'threads' else 'TEXT'} NOT NULL" for f in fields(Key)
        )
        names = ", ".join(f.name for f in fields(Key))
        self._connection.execute(
            f"CREATE TABLE IF NOT EXISTS costs ({keys}, status TEXT, cost_s REAL, min_s REAL, median_s REAL, "
            "samples INTEGER, load REAL, unstable INTEGER, detail TEXT, title TEXT, time REAL, "
            f"PRIMARY KEY ({names}))"
        )
        self._connection.execute("CREATE TABLE IF NOT EXISTS tuning (name TEXT PRIMARY KEY, record BLOB)")
        self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def get(self, key: Key) -> Measurement | None:
        """What is known under a key."""
        where = " AND ".join(f"{f.name} = ?" for f in fields(Key))
        row = self._connection.execute(
            "SELECT status, cost_s, min_s, median_s, samples, load, unstable, detail FROM costs "
            f"WHERE {where}",
            astuple(key),
        ).fetchone()
        return None if row is None else _measurement(row)

    def put(self, key: Key, measurement: Measurement, title: str = "") -> None:
        """Writes a measurement; what was under the key before goes."""
        values = (*astuple(key), *astuple(measurement), title, time.time())
        marks = ", ".join("?" * len(values))
        self._connection.execute(f"INSERT OR REPLACE INTO costs VALUES ({marks})", values)

    def entries(self, *, backend: str | None = None, status: str | None = None) -> Iterator[Entry]:
        """The rows, newest first."""
        query, values = _where(backend=backend, status=status)
        for row in self._connection.execute(f"SELECT * FROM costs{query} ORDER BY time DESC", values):
            count = len(fields(Key))
            yield Entry(Key(*row[:count]), _measurement(row[count : count + 8]), row[-2], row[-1])

    def prune(
        self, *, backend: str | None = None, status: str | None = None, older_than_s: float | None = None
    ) -> int:
        """Deletes rows; all that satisfy every condition given.

        Returns:
            How many.
        """
        query, values = _where(backend=backend, status=status, older_than_s=older_than_s)
        return self._connection.execute(f"DELETE FROM costs{query}", values).rowcount

    def tuned(self, name: str) -> bytes | None:
        """What a backend's tuner found, under a name that holds all that it depends on."""
        row = self._connection.execute("SELECT record FROM tuning WHERE name = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])

    def keep_tuned(self, name: str, record: bytes) -> None:
        """Keeps what a backend's tuner found."""
        self._connection.execute("INSERT OR REPLACE INTO tuning VALUES (?, ?)", (name, record))

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()


def _where(
    *, backend: str | None = None, status: str | None = None, older_than_s: float | None = None
) -> tuple[str, list[object]]:
    conditions: list[str] = []
    values: list[object] = []
    for column, value in (("backend", backend), ("status", status)):
        if value is not None:
            conditions.append(f"{column} = ?")
            values.append(value)
    if older_than_s is not None:
        conditions.append("time < ?")
        values.append(time.time() - older_than_s)
    return (" WHERE " + " AND ".join(conditions) if conditions else ""), values


def _measurement(row: tuple[object, ...]) -> Measurement:
    status, cost, low, median, samples, load, unstable, detail = row
    infinite = float("inf")
    return Measurement(
        status,  # type: ignore[arg-type]
        infinite if cost is None else cost,  # type: ignore[arg-type]
        infinite if low is None else low,  # type: ignore[arg-type]
        infinite if median is None else median,  # type: ignore[arg-type]
        samples,  # type: ignore[arg-type]
        load,  # type: ignore[arg-type]
        bool(unstable),
        detail,  # type: ignore[arg-type]
    )
