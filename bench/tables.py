"""Tables as text, for a terminal or for Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align the columns with spaces."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a GitHub Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
