"""The machines: a hierarchy of levels, each with a bandwidth, down to single devices.

In:  how many components each level joins, and the links between them.
Out: bandwidth, latency and the contended resources of the path between any two devices.

Devices are numbered so that the members of a component are consecutive: device `d` is in component
`d // width(k)` of level `k`, where `width(k)` is the number of devices in one component of that level.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any, Literal, get_args

from pipeline.errors import TopologyError

Sharing = Literal["none", "uplink", "medium"]
Resource = tuple[str, int, int]
"""A link that transfers contend for: its kind, and the devices, or level and component, it belongs to."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the hierarchy.

    Attributes:
        count: How many components of the level below (devices, for the first level) one component joins.
        bandwidth: Bytes per second of one link of this level.
        latency_s: Seconds that a message takes on top of its bytes.
        sharing: Who shares a link. `none`: every ordered pair of devices has its own. `uplink`: each
            component of the level below has one way out and one way in, as a server with one network card.
            `medium`: all transfers inside one component share it, as copies over one memory bus or loopback
            on one host.
    """

    count: int
    bandwidth: float
    latency_s: float = 0.0
    sharing: Sharing = "none"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise TopologyError(f"a level joins {self.count} components; it must be at least 1.")
        if not self.bandwidth > 0:
            raise TopologyError(f"a level has bandwidth {self.bandwidth} bytes/s; it must be positive.")
        if not (self.latency_s >= 0 and isfinite(self.latency_s)):
            raise TopologyError(f"a level has latency {self.latency_s} s; it must be a number >= 0.")
        if self.sharing not in get_args(Sharing):
            raise TopologyError(
                f"a level has sharing {self.sharing!r}; one of {', '.join(get_args(Sharing))}."
            )


@dataclass(frozen=True, slots=True)
class Topology:
    """Levels, innermost first, and the memory of each device (None: unlimited)."""

    levels: tuple[Level, ...]
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if not self.levels:
            raise TopologyError("a topology needs at least one level.")
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise TopologyError(f"a device has {self.memory_bytes} bytes of memory; it must be positive.")

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return prod(level.count for level in self.levels)

    def width(self, level: int) -> int:
        """Devices in one component of a level; level -1 is a single device."""
        return prod(x.count for x in self.levels[: level + 1])

    def level_between(self, a: int, b: int) -> int:
        """The innermost level whose component holds both devices; -1 when they are the same."""
        for device in (a, b):
            if not 0 <= device < self.devices:
                raise TopologyError(f"device {device} does not exist; there are {self.devices}.")
        if a == b:
            return -1
        return next(k for k in range(len(self.levels)) if a // self.width(k) == b // self.width(k))

    def ring_seconds_per_byte(self, devices: Sequence[int]) -> float:
        """Seconds per byte of the slowest link of a ring over the devices; 0 for a single one."""
        return max(self.transfer(a, b)[1] for a, b in zip(devices, [*devices[1:], devices[0]], strict=True))

    def transfer(self, a: int, b: int) -> tuple[float, float, tuple[Resource, ...]]:
        """How a message gets from device a to device b.

        Returns:
            Latency in seconds, seconds per byte, and the resources it occupies. A message to oneself is free.
        """
        k = self.level_between(a, b)
        if k < 0:
            return 0.0, 0.0, ()
        level = self.levels[k]
        resources: tuple[Resource, ...]
        if level.sharing == "medium":
            resources = (("medium", k, a // self.width(k)),)
        elif level.sharing == "uplink":
            below = self.width(k - 1)
            resources = (("out", k, a // below), ("in", k, b // below))
        else:
            resources = (("link", a, b),)
        return level.latency_s, 1.0 / level.bandwidth, resources


def flat(
    devices: int, bandwidth: float, *, latency_s: float = 0.0, memory_bytes: float | None = None
) -> Topology:
    """Devices that are all joined alike."""
    return Topology((Level(devices, bandwidth, latency_s),), memory_bytes)


def topology_from_json(content: Any) -> Topology:
    """A topology from its JSON value: `{"levels": [{"count", "bandwidth", ...}], "memory_bytes"}`."""
    try:
        levels = tuple(Level(**level) for level in content["levels"])
        return Topology(levels, content.get("memory_bytes"))
    except KeyError as error:
        raise TopologyError(f"the topology lacks the key {error}.") from error
    except (TypeError, AttributeError) as error:
        raise TopologyError(f"the topology is malformed: {error}.") from error


def topology_to_json(topology: Topology) -> dict[str, Any]:
    """The JSON value that `topology_from_json` reads back."""
    return asdict(topology)


def read_topology(path: str | Path) -> Topology:
    """A topology from a JSON file."""
    try:
        return topology_from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise TopologyError(f"cannot read the topology {path}: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise TopologyError(f"{path} is not JSON: {error}.") from error
