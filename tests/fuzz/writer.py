"""Writes the source of a program, statement by statement, and knows which variables each line may use."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from hypothesis import strategies as st


@dataclass
class Scope:
    """Variables that are defined from here on: tensors of shape (n, 3), of shape (), and numbers."""

    matrices: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)


class Writer:
    """Lines of source under construction. Everything that varies is drawn by Hypothesis, so it shrinks.

    In `user_code` percent of the places where it could, autograd calls functions of the program.
    """

    def __init__(self, draw, user_code):
        self.draw = draw
        self.user_code = user_code
        self.lines = []
        self.depth = 0
        self.scopes = [Scope()]
        self.counter = 0
        self.loops = 0

    def emit(self, line):
        self.lines.append("    " * self.depth + line)

    @contextlib.contextmanager
    def block(self, head):
        """An indented block; what is defined in it is not used behind it."""
        self.emit(head)
        self.depth += 1
        self.scopes.append(Scope())
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.emit("pass")
        self.scopes.pop()
        self.depth -= 1

    def choose(self, options):
        return self.draw(st.sampled_from(options))

    def chance(self, percent):
        """True in about so many cases; False is simpler."""
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def count(self, most):
        """A small number; fewer are simpler."""
        return self.draw(st.integers(0, most))

    def define(self, kind, prefix, value):
        """Write the definition of a new variable of this scope, and return its name."""
        self.counter += 1
        name = f"{prefix}{self.counter}"
        self.emit(f"{name} = {value}")
        getattr(self.scopes[-1], kind).append(name)
        return name

    def known(self, kind):
        return [name for scope in self.scopes for name in getattr(scope, kind)]

    def matrix(self):
        return self.choose(self.known("matrices"))

    def scalar(self):
        """An expression without dimensions."""
        ways = [f"{self.matrix()}.mean()", f"{self.matrix()}.sum().tanh()", f"{self.matrix()}[0, 1]"]
        return self.choose([*self.known("scalars"), *ways])

    def number(self):
        """An expression that is a Python number: a constant, or one that changes from step to step."""
        constants = ["0.5", "2.0", "-1.5", "0.1", "1.0", "3"]
        changing = ["state.rate", "0.1 * k", "1 / (k + 1)", "state.count * 0.25", "random.random()"]
        return self.choose([*constants, *self.known("numbers"), *changing])

    def condition(self):
        """A condition on Python's values or on a tensor's."""
        on_python = [
            "k % 2 == 0",
            "k % 3 == 1",
            "k > 4",
            "k == 5",
            "state.count % 3 == 0",
            "random.random() < 0.5",
            "len(x) == 4",
            "state.model.training",
        ]
        if self.chance(60):
            return self.choose(on_python)
        scalar = self.scalar()
        return self.choose([f"{scalar}.item() > 0", f"{scalar} < 0.1", f"bool({scalar}.abs() > 0.3)"])
