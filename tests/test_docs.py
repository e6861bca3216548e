"""The documentation: the site builds strictly, and the folder itself reads well on a code host."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bier
from bier.cli import app

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "reliability"))
security_page = importlib.import_module("security_page")
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_site_builds_strictly_with_every_command_and_name(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    python = (tmp_path / "python.html").read_text(encoding="utf-8")
    for name, home in bier._HOME.items():
        assert f'id="{home}.{name}"' in python
    commands = (tmp_path / "commands.html").read_text(encoding="utf-8")
    for one in app.registered_commands:
        assert f'id="bier-{one.name or one.callback.__name__}"' in commands
    assert "bier train --resume runs/shop" in commands
    assert "[bold]" not in commands
    method = (tmp_path / "method.html").read_text(encoding="utf-8")
    assert "<math" in method
    assert "$" not in re.sub(r"<script.*?</script>", "", method, flags=re.DOTALL)
    assert not re.search("^<math", method, flags=re.MULTILINE)  # a formula of a sentence, taken for a paragraph
    assert 'href="python.html#bier.method.losses.BinomialDeviance"' in method
    for page in tmp_path.glob("*.html"):
        for source in re.findall(r'<img [^>]*src="([^"]*)"', page.read_text(encoding="utf-8")):
            assert source.startswith("data:") or (tmp_path / source).is_file(), (page.name, source)
    of_code = re.findall(r'href="(source/[^"#]*)#([^"]*)"', method)
    assert len(of_code) > 30  # each equation has its function and its test
    for name, line in of_code:
        assert f'id="{line}"' in (tmp_path / name).read_text(encoding="utf-8")


def test_links_lead_somewhere() -> None:
    """Of the pages too that mkdocs does not build."""
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


def test_security_shows_the_figures_of_the_reliability_suite() -> None:
    """`make soak` writes them; every file of its tests has a row."""
    text = security_page.PAGE.read_text(encoding="utf-8")
    assert security_page.page_of(text) == text
    tests = {path.stem for path in (ROOT / "tests" / "reliability").glob("test_*.py")}
    assert tests == set(security_page.ROWS)
    record = {
        "families": {name: {"x": {"tried": 1000, "survived": 1000, "data lost": 0}} for name in tests},
        "date": "1970-01-01",
        "commit": "abc",
        "share": 1.0,
        "minutes": 3.2,
        "machine": "a machine",
        "tests": {"passed": 5, "failed": 0, "error": 0, "skipped": 1},
        "remarks": ["server: fast"],
    }
    shown = security_page.figures_of(record)
    assert f"| **all** | {1000 * len(tests):,} | {1000 * len(tests):,} | 0 |" in shown
    assert "3 minutes on a machine" in shown
    assert shown.endswith("- server: fast")
