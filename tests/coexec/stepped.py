"""A GraphRunner whose progress the test chooses, so that no interleaving is left to luck.

Each time Python sends a message, the graph takes a number of steps that the test has chosen; then it
stands still. It runs on while Python waits for a fetch, until that value is published, and after the
commit. No steps at all is Python as far ahead as it can be; `ALL` is the graph as far ahead as it can be.
"""

from __future__ import annotations

import itertools
import random
import threading

from coexec.runners.interpreter import Cancelled, InterpretedRunner

ALL = 10**9


def python_first():
    return SteppedRunner(itertools.repeat(0))


def graph_first():
    return SteppedRunner(itertools.repeat(ALL))


def seeded(seed):
    numbers = random.Random(seed)
    return SteppedRunner(iter(lambda: numbers.choice((0, 0, 1, 1, 2, 5, 20, ALL)), None))


class SteppedRunner(InterpretedRunner):
    """Takes the next number of steps of `turns` at the start and at each message."""

    def __init__(self, turns):
        super().__init__()
        self._turns = turns
        self._control = threading.Condition()
        self.log = []

    def begin(self, program, captured, start):
        self._budget, self._idle, self._free, self._wanted = 0, False, False, None
        self._ended = self._at_commit = False
        self.log.append(("begin",))
        super().begin(program, captured, start)
        self._begun = start
        if start:
            self._let(next(self._turns))

    def send(self, message):
        with self._control:
            self._idle = False
            super().send(message)
        if self._begun:
            self._let(next(self._turns))

    def fetch(self, slot):
        self._begun = True
        self.log.append(("python waits", slot))
        with self._control:
            if slot not in self._published:
                self._wanted, self._free = slot, True
            self._control.notify_all()
        return super().fetch(slot)

    def commit(self):
        self.log.append(("commit",))
        with self._control:
            self._free = True
            self._control.notify_all()
        super().commit()

    def cancel(self):
        self.log.append(("cancel",))
        with self._control:
            self._free = True
            self._control.notify_all()
        super().cancel()

    def _let(self, steps):
        with self._control:
            self._budget += steps
            self._control.notify_all()
            self._control.wait_for(lambda: self._budget == 0 or self._idle or self._at_commit or self._ended)
            self._budget = 0

    # --- the thread ---

    def _step(self):
        with self._control:
            self._control.notify_all()
            self._control.wait_for(lambda: self._free or self._budget > 0)
            if self._cancelled:
                raise Cancelled
            if not self._free:
                self._budget -= 1

    def _stand(self):
        with self._control:
            if self._messages.empty():
                self._idle = True
                self._control.notify_all()

    def _call(self, call):
        self._step()
        self.log.append(("call", str(call.target)))
        super()._call(call)

    def _receive(self):
        self._step()
        self._stand()
        return super()._receive()

    def _publish(self, slot, value):
        self._step()
        self.log.append(("published", slot))
        with self._control:
            if slot == self._wanted:
                self._wanted, self._free = None, False
        super()._publish(slot, value)

    def _wait_for_commit(self):
        self._step()
        with self._control:
            self._at_commit = True
            self._control.notify_all()
        super()._wait_for_commit()

    def _run(self):
        try:
            super()._run()
        finally:
            with self._control:
                self._ended = True
                self._control.notify_all()
