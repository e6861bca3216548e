"""docs/method.md numbers every equation once, and each link to code names something that is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "method.md"
TEXT = PAGE.read_text(encoding="utf-8")
LINKS = re.findall(r"\[`([^\]`]+)`\]\(([^)]+\.py)\)", TEXT + PAGE.with_name("losses.md").read_text(encoding="utf-8"))
NUMBERS = re.findall(r"\\tag\{(\w+)\}", TEXT)
EXPECTED = [*map(str, range(1, 8)), "7b", "7c", *map(str, range(8, 21))]


def defined(path: Path) -> set[str]:
    """Names of functions and classes in a file, methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def test_equations_are_numbered_once_and_in_order() -> None:
    assert NUMBERS == EXPECTED
    assert TEXT.count("$$") == 2 * len(NUMBERS)


def test_every_equation_has_a_function_and_a_test() -> None:
    after = re.split(r"\\tag\{\w+\}", TEXT)[1:]
    for number, text in zip(NUMBERS, after, strict=True):
        until_next = text.split("$$\n")[1]
        assert re.search(r"Code: \[`\w[\w.]*`\]\(\.\./src/bier/", until_next), number
        assert re.search(r"Test: \[`test_\w+`\]\(\.\./tests/", until_next), number


@pytest.mark.parametrize(("name", "target"), LINKS)
def test_a_link_leads_to_what_it_names(name: str, target: str) -> None:
    path = PAGE.parent / target
    assert path.is_file()
    assert name in defined(path)


@pytest.mark.parametrize("path", sorted((ROOT / "src/bier/method").glob("*.py")), ids=lambda path: path.name)
def test_docstrings_cite_numbers_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    cited = re.findall(r"Eq\. \((\w+)\)(?: (?:to|and|or) \((\w+)\))?", text)
    assert {number for pair in cited for number in pair if number and number != "n"} <= set(EXPECTED)
    assert not re.search(r"\b[Ll]ines? \d", text)  # what the numbers were called before


def test_every_equation_is_cited_in_a_docstring() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/bier").rglob("*.py"))
    covered = set(re.findall(r"\((\d+[bc]?)\)", source))
    for first, last in re.findall(r"Eq\. \((\d+)\) to \((\d+)\)", source):
        covered |= {str(number) for number in range(int(first), int(last) + 1)}
    assert set(EXPECTED) <= covered
