"""The words of Python's own standard library, as numbers."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MODULES = (
    "argparse.py",
    "ast.py",
    "datetime.py",
    "doctest.py",
    "inspect.py",
    "pdb.py",
    "tarfile.py",
    "typing.py",
)
"""Large plain modules that every supported Python has."""
PADDING, START, SEPARATOR, UNKNOWN = range(4)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The most frequent words, numbered by frequency behind the four special ones."""

    numbers: dict[str, int]

    @staticmethod
    def of(texts: Iterable[Sequence[str]], size: int) -> Vocabulary:
        """Number the words of texts; `size` counts the special words, too."""
        counts = Counter(word for text in texts for word in text)
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - 4]
        return Vocabulary({word: number for number, word in enumerate(frequent, start=4)})

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the words' numbers."""
        return [self.numbers.get(word, UNKNOWN) for word in words]


def read_module(name: str) -> str:
    """Return the source of one module."""
    return (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")


def split_words(text: str) -> list[str]:
    """Split text into identifiers, numbers and single signs."""
    return re.findall(r"\w+|[^\w\s]", text)


def read_texts(module: str, lines: int) -> list[list[str]]:
    """Return the words of every stretch of so many lines of a module that has at least four."""
    source = [line for line in read_module(module).splitlines() if line.strip()]
    texts = (split_words(" ".join(source[first : first + lines])) for first in range(0, len(source), lines))
    return [words for words in texts if len(words) >= 4]


def pad(rows: Sequence[Sequence[int]], length: int, value: int = PADDING) -> list[list[int]]:
    """Make all rows as long as `length`, which none of them exceeds."""
    return [[*row, *[value] * (length - len(row))] for row in rows]
