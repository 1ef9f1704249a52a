"""Which devices run which stage.

In:  the numbers of stages, replicas and tensor-parallel devices.
Out: for each stage and replica, its devices, numbered as a `Topology` numbers them.
"""

from __future__ import annotations

Placement = tuple[tuple[tuple[int, ...], ...], ...]
"""Devices by stage and replica."""


def standard(stages: int, *, replicas: int = 1, tensor_parallel: int = 1) -> Placement:
    """Tensor-parallel devices side by side, then replicas, then stages in order.

    Source: BPipe, Figure 5 (a); PTD-P's takeaways put tensor parallelism innermost.
    """
    return tuple(
        tuple(_group(s * replicas + r, tensor_parallel) for r in range(replicas)) for s in range(stages)
    )


def pipeline_adjacent(stages: int, *, replicas: int = 1, tensor_parallel: int = 1) -> Placement:
    """Tensor-parallel devices side by side, then the stages of one replica, then the next replica."""
    return tuple(
        tuple(_group(r * stages + s, tensor_parallel) for r in range(replicas)) for s in range(stages)
    )


def pair_adjacent(stages: int, *, replicas: int = 1, tensor_parallel: int = 1) -> Placement:
    """Tensor-parallel devices side by side, then each stage s beside stage p-1-s, then replicas.

    Evictor and acceptor are neighbours, so that transfers stay inside a server wherever 2t devices do.

    Source: BPipe, section 3.5 and Figure 6.
    """
    position = {}
    for s in range(stages // 2):
        position[s], position[stages - 1 - s] = 2 * s, 2 * s + 1
    if stages % 2:
        position[stages // 2] = stages - 1
    return tuple(
        tuple(_group(r * stages + position[s], tensor_parallel) for r in range(replicas))
        for s in range(stages)
    )


def _group(number: int, size: int) -> tuple[int, ...]:
    return tuple(range(number * size, (number + 1) * size))
