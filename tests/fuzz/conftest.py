from tests.coexec.conftest import _fresh, in_pieces_always, merges, use_runner  # noqa: F401  the same fixtures
from tests.fuzz.check import tally


def pytest_terminal_summary(terminalreporter):
    if tally.programs:
        terminalreporter.write_line(f"fuzzing: {tally}")
