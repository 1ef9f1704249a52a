"""Runs the pages of the documentation, and writes what they print back into them.

    python docs/generate.py [PAGE...]            rewrite the pages that are out of date
    python docs/generate.py --check [PAGE...]    only name them; the exit status is 1 if there are any

In:  Markdown. Every ```python block runs, in order, in one namespace a page; a ```text block directly
     behind one is what it printed. A block in a comment, `<!-- python ... -->`, runs unseen. A block is
     the file that its first line names (`# train.py`), else `train.py`, so `train.py:3` is its third line.
Out: the same pages with those outputs, and with the parts between `<!-- generated: NAME -->` and
     `<!-- /generated -->`, which come from the sources.

Times differ from run to run: a number before `ms`, `s` or `waiting` is printed as it was and not compared.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import os
import re
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import coexec
from bench import placing_report
from bench.commands.coverage import outcome
from bench.peers import PEERS
from bench.records import Result, result_from_json
from bench.tables import markdown_table
from coexec.reasons import REASONS
from coexec.tracegraph import verify

ROOT = Path(__file__).resolve().parents[1]

_CODE = re.compile(
    r"(?:^<!-- python\n(?P<hidden>.*?)^-->\n|^```python\n(?P<shown>.*?)^```\n)"
    r"(?:\n?^```text\n(?P<text>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
_GENERATED = re.compile(
    r"(?P<begin>^<!-- generated: (?P<name>[\w ]+) -->\n)(?P<body>.*?)(?P<end>^<!-- /generated -->$)",
    re.DOTALL | re.MULTILINE,
)
_TIME = re.compile(r"\b\d+(\.\d+)?(?= (?:ms|s|waiting)\b)")


def pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def masked(text: str) -> str:
    """The text with its times made equal."""
    return _TIME.sub("N", text)


def updated(page: Path) -> str:
    """What the page should hold: today's outputs and generated parts, times as they were printed."""
    text = _GENERATED.sub(_generated, page.read_text())
    outputs = iter(_outputs([m["hidden"] or m["shown"] for m in _CODE.finditer(text)]))

    def replaced(match: re.Match[str]) -> str:
        output, old = next(outputs), match["text"]
        if old is None or masked(old) == masked(output):
            return match[0]
        return match[0].replace(f"```text\n{old}", f"```text\n{output}")

    return _CODE.sub(replaced, text)


# --- running ----------------------------------------------------------------------------------------


def _outputs(blocks: list[str]) -> Iterator[str]:
    """Runs the blocks of one page; yields what each printed."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    with _fresh_process(), tempfile.TemporaryDirectory() as folder, _directory(folder):
        for block in blocks:
            named = re.match(r"# (\w+\.py)$", block, re.MULTILINE)
            path = os.path.join(folder, named[1] if named else "train.py")
            Path(path).write_text(block)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block, path, "exec"), namespace)
            yield "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines())


@contextlib.contextmanager
def _fresh_process() -> Iterator[None]:
    """As good as one: no programs, default options, seeded generators; all as it was afterwards."""
    before = {name: getattr(coexec.options, name) for name in coexec.options.__dataclass_fields__}
    random_state, logger = torch.get_rng_state(), logging.getLogger("coexec")
    level = logger.level
    coexec.reset()
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        logger.setLevel(level)
        coexec.reset()
        torch.set_rng_state(random_state)
        for name, value in before.items():
            setattr(coexec.options, name, value)


@contextlib.contextmanager
def _directory(folder: str) -> Iterator[None]:
    before = os.getcwd()  # contextlib.chdir is new in Python 3.11
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# --- generated parts --------------------------------------------------------------------------------


def reasons_table() -> str:
    """Every reason with its kind."""
    rows = ["| id | what happened | what to do |", "|---|---|---|"]
    for reason in REASONS.values():
        rows.append(f"| [{reason.id}](fallbacks.md#{reason.id.lower()}) | {reason.title} | {reason.hint} |")
    return "\n".join(rows)


def reason(id_: str) -> str:
    """One reason, as a section of fallbacks.md begins."""
    return f"**{REASONS[id_].title.capitalize()}.** {REASONS[id_].hint}"


def rules() -> str:
    """The rules of the verifier, from the calls that report a broken one."""
    lines = []
    for function in (verify.verify_trace, verify.verify_graph, verify.verify_program):
        lines += [f"`{function.__name__}`: {_first_line(function)}", ""]
        found = re.findall(r'_broken\(\s*f?"(.*?)",', inspect.getsource(function))
        lines += [f"- {rule.replace('r{register}', 'rN')}" for rule in dict.fromkeys(found)] + [""]
    return "\n".join(lines).rstrip()


def public_api() -> str:
    """Signature and docstring of every public name."""
    parts = []
    for name in coexec.__all__:
        thing = getattr(coexec, name)
        if name == "options":
            parts.append("### `options`\n\nThe defaults of all tapes; assign to its attributes.")
            continue
        parts.append(f"### `{name}{_signature(thing)}`\n\n{_prose(thing)}")
        if isinstance(thing, type):
            parts += [
                f"#### `{name}.{method}{_signature(function)}`\n\n{_prose(function)}"
                for method in vars(thing)
                if isinstance(function := getattr(thing, method), types.FunctionType)
                and not method.startswith("_")
                and function.__doc__
            ]
    return "\n\n".join(parts)


def _signature(thing: object) -> str:
    if isinstance(thing, type) and issubclass(thing, Exception):
        return ""
    if isinstance(thing, type) and thing in (coexec.Explanation, coexec.ProgramReport):
        return ""  # made by coexec only
    text = str(inspect.signature(thing))  # type: ignore[arg-type]  # public names are callable
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are strings
    return text.replace("(self, ", "(").replace("(self)", "()").removesuffix(" -> None")


def _prose(thing: object) -> str:
    """A Google docstring as Markdown: the sections' names bold, their entries a list."""
    out, in_section = [], False
    for line in inspect.cleandoc(getattr(thing, "__doc__", None) or "").splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Attributes):", line):
            in_section = True
            out += [f"**{line}**", ""]
        elif in_section and (entry := re.fullmatch(r"    (\S[\w, ]*): (.*)", line)):
            out.append(f"- `{entry[1]}`: {entry[2]}")
        elif in_section and line.startswith("    "):
            out.append(f"  {line.strip()}" if out and out[-1].startswith(("- ", "  ")) else line.strip())
        else:
            in_section = in_section and not line.strip()
            out.append(line)
    return "\n".join(out).strip()


def _first_line(thing: object) -> str:
    return inspect.cleandoc(thing.__doc__ or "").splitlines()[0]


def divergences() -> str:
    """Every known difference from eager: its kind, the claim of its test, and what the test says about it."""
    kinds = {"silent": "silent", "late": "late", "raised": "an error", "seen": "visible to who looks"}
    rows = ["| what differs | kind | |", "|---|---|---|"]
    for kind, test in _known_divergences():
        claim = test.__name__.removeprefix("test_").replace("_", " ")
        rows.append(f"| {claim} | {kinds[kind]} | {' '.join((test.__doc__ or '').split())} |")
    return "\n".join(rows)


def divergence_count() -> str:
    """How many differences from eager are known, by kind."""
    kinds = Counter(kind for kind, _ in _known_divergences())
    return (
        f"Known differences from eager: {kinds.total()}, each"
        " [shown by a test](tests/test_known_divergences.py) and listed in"
        f" [docs/limits.md](docs/limits.md#what-differs-from-eager). {kinds['silent']} are silent,"
        f" {kinds['late']} are late, {kinds['raised']} raise another error, and {kinds['seen']} are visible"
        " only to a program that looks at how things are done."
    )


def _known_divergences() -> list[tuple[str, Callable[[], None]]]:
    sys.path.insert(0, str(ROOT))  # tests are no package
    from tests.test_known_divergences import DIVERGENCES

    sys.path.remove(str(ROOT))
    found: list[tuple[str, Callable[[], None]]] = DIVERGENCES
    return found


def coverage() -> str:
    """What came of every case and program with every peer, from the newest records of `bench coverage`."""
    newest: dict[tuple[str, str], Result] = {}
    sources = {}
    records = [json.loads(path.read_text()) for path in (ROOT / "bench" / "results").glob("coverage_*.json")]
    for record in sorted(records, key=lambda record: str(record["environment"]["date"])):
        machine = record["environment"]
        sources[record["command"]] = (
            f"- `{record['command']}`: {machine['date'][:10]}, torch {machine['torch']}, {machine['cpu']}"
        )
        for fields in record["results"]:
            result = result_from_json(fields)
            newest[result.program, result.mode] = result
    columns = [peer for peer in PEERS if any(mode == peer for _, mode in newest)]
    rows = [
        [name, *(outcome(newest[name, peer]) if (name, peer) in newest else "" for peer in columns)]
        for name in dict.fromkeys(program for program, _ in newest)
    ]
    counts = ["**equal to eager**"]
    for peer in columns:
        tried = [result for (_, mode), result in newest.items() if mode == peer]
        counts.append(f"**{sum(bool(result.equal) for result in tried)} of {len(tried)}**")
    return "\n".join([markdown_table(["", *columns], [*rows, counts]), "", *sources.values()])


def placement_results() -> list[dict[str, Any]]:
    """What the records of `bench placement` hold, in the order of batch sizes and workloads."""
    paths = (ROOT / "bench" / "results").glob("placement_*.json")
    rows = [row for path in sorted(paths) for row in json.loads(path.read_text())["results"]]
    return sorted(rows, key=lambda row: row["batch"])


def placement_gains() -> str:
    """What placement gains over the best of the others."""
    return markdown_table(placing_report.GAINS, placing_report.gains(placement_results()))


def placement_speeds() -> str:
    """How fast each mode is, relative to eager."""
    return markdown_table(*placing_report.speeds(placement_results()))


def placement_ablation() -> str:
    """How fast the placement is, relative to eager, with more and more backends."""
    return markdown_table(*placing_report.ablations(placement_results()))


_PARTS: dict[str, Callable[..., str]] = {
    "reasons": reasons_table,
    "reason": reason,
    "rules": rules,
    "api": public_api,
    "divergences": divergences,
    "divergence count": divergence_count,
    "coverage": coverage,
    "placement gains": placement_gains,
    "placement speeds": placement_speeds,
    "placement ablation": placement_ablation,
}


def _generated(match: re.Match[str]) -> str:
    part = match["name"]
    name, *arguments = [part] if part in _PARTS else part.split()
    return f"{match['begin']}\n{_PARTS[name](*arguments)}\n\n{match['end']}"


def main(arguments: list[str]) -> int:
    """Rewrites or names the pages that are out of date."""
    check = "--check" in arguments
    chosen = [Path(a).resolve() for a in arguments if a != "--check"] or pages()
    outdated = 0
    for page in chosen:
        new = updated(page)
        if new != page.read_text():
            outdated += 1
            print(page.relative_to(ROOT))
            if not check:
                page.write_text(new)
    return 1 if check and outdated else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
