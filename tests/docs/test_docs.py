"""The documentation is true: its code runs and prints what the pages say, and its lists are complete."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import coexec
from coexec._native import core
from coexec.reasons import REASONS
from coexec.tracegraph import verify

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)

# Lines of torch's own files, and which calls they make, are printed too.
PINNED = re.search(r"^torch==(\S+)", (ROOT / "requirements" / "base.txt").read_text(), re.MULTILINE)[1]
same_torch = torch.__version__.split("+")[0] == PINNED


@pytest.mark.skipif(core is None, reason="the pages show what the native GraphRunner does")
@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_and_prints_what_it_says(page):
    text = generate.updated(page)

    if same_torch:
        assert text == page.read_text(), "python docs/generate.py brings the page up to date"


def test_times_are_not_compared():
    assert generate.masked("made in 0.13 s, 2 steps, 1.5 ms and 0.2 waiting") == (
        "made in N s, 2 steps, N ms and N waiting"
    )


def test_an_outdated_output_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")

    assert "```text\n2\n```" in generate.updated(page)


def test_what_the_contract_calls_not_equal_is_not_equal():
    section = re.search(r"^## What is not equal\n(.*?)^## ", (DOCS / "contract.md").read_text(), re.S | re.M)[
        1
    ]
    outcomes = re.findall(r"^eager +(.*)\ncoexec +(.*)$", section, re.MULTILINE)

    assert len(outcomes) > 5
    assert all(eager != coexecuted for eager, coexecuted in outcomes)


def test_every_reason_has_a_section_with_an_example_and_nothing_else_has():
    sections = re.findall(
        r"^## (CX\d{4})\n(.*?)(?=^## |\Z)", (DOCS / "fallbacks.md").read_text(), re.S | re.M
    )

    assert sorted(id_ for id_, _ in sections) == sorted(REASONS)
    for id_, body in sections:
        assert f"<!-- generated: reason {id_} -->" in body
        assert "**Repair.**" in body


def test_every_rule_of_the_verifier_is_listed():
    source = Path(verify.__file__).read_text()
    page = (DOCS / "tracegraph.md").read_text()
    rules = {text.replace("r{register}", "rN") for text in re.findall(r'_broken\(\s*f?"(.*?)",', source)}

    assert len(rules) == len(set(re.findall(r'_broken\(\s*\n?\s*f?"(.*?)"', source)))
    assert source.count("_broken(") - 1 >= len(rules) > 15
    assert [rule for rule in rules if f"- {rule}\n" not in page] == []


def test_every_option_and_public_name_is_described():
    page = (DOCS / "api.md").read_text()

    for name in coexec.__all__:
        assert f"`{name}" in page
    for name in (*coexec.Options.__dataclass_fields__, *coexec.ProgramReport.__dataclass_fields__):
        assert re.search(rf"`[\w, ]*\b{name}\b[\w, ]*`", page), name


def test_links_between_pages_lead_somewhere():
    for page in generate.pages():
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if target.startswith(("http:", "https:")):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
                assert anchor in anchors, f"{page.name}: {target}"


def test_every_page_is_linked_from_the_index():
    linked = set(re.findall(r"\]\(([^)#]+)\)", (DOCS / "index.md").read_text()))

    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix()
        assert name == "index.md" or name in linked, name


def test_the_source_files_that_pages_name_exist():
    for page in generate.pages():
        for name in re.findall(r"`((?:coexec|bench|docs|tests|scripts)/[\w/.]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
