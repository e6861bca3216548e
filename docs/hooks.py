"""What MkDocs does for the site beyond the pages of this folder, which stay readable as they are on a code host.

Generated pages: the start page (README.md), the changelog, every command and every public Python name. Equations become
MathML here, so that the site needs no script from another host. Links to files outside docs/ become links to the
repository where mkdocs.yml names one (repo_url), plain text elsewhere; a file that does not exist is an error.
"""

import re
from pathlib import Path
from typing import Any

import griffe
import typer
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

import bier
from bier.cli import app

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
FROM_ROOT = re.compile(r"\]\((?!docs/|https?:|#|mailto:)")
IMAGE = re.compile(r'(<img src=")docs/')


class Examples(griffe.Extension):  # type: ignore[misc]
    """Our docstrings say `Example:`; the code below it is shown as code only under `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "index.md": _from_root("README.md"),
        "changelog.md": _from_root("CHANGELOG.md"),
        "commands.md": _commands(),
        "python.md": _python(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if "$$" in markdown:
        markdown = _equations(markdown)
    return LINK.sub(lambda link: _link(link, page, config, files), markdown)


def _from_root(name: str) -> str:
    """A page of the root, its links as seen from docs/."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](CHANGELOG.md)", "](docs/changelog.md)")
    text = FROM_ROOT.sub("](../", text)
    return IMAGE.sub(r"\1", text.replace("](docs/", "]("))


def _commands() -> str:
    """typer's own documentation of every command, with its examples as code."""
    command: Any = typer.main.get_command(app)
    context = typer.Context(command, info_name="bier")
    text = get_docs_for_click(obj=command, ctx=context, name="bier", title="Commands")
    text = re.sub(r"\[/?bold\]", "**", text).replace("\\[", "[")
    text = re.sub(r"^ *((?:torchrun .* -m )?bier [a-z].*)$", r"    \1", text, flags=re.MULTILINE)
    text = re.sub(r"^\* `--help`.*\n", "", text, flags=re.MULTILINE)
    # The table of contents lists the commands, and in full.
    return re.sub(r"\*\*(Commands|Options)\*\*:\n\n((\* `[a-z]+`: .*\n)+|(?=\n))", "", text)


def _python() -> str:
    """Every name of `bier`, from the docstrings of the modules that define them."""
    names = "\n\n".join(f"::: {home}.{name}" for name, home in sorted(bier._HOME.items()))
    return f"# Python\n\nThe names of `import bier`, each with its signature and its arguments.\n\n{names}\n"


def _equations(markdown: str) -> str:
    """$$…$$ and $…$ as MathML; the number of an equation stands at its right."""

    def displayed(found: re.Match[str]) -> str:
        latex = found[1]
        tag = re.search(r"\\tag\{([^}]*)\}", latex)
        number = f"<span>({tag[1]})</span>" if tag else ""
        math = convert(re.sub(r"\\tag\{[^}]*\}", "", latex).strip(), display="block")
        return f'<div style="display:flex;overflow-x:auto"><div style="flex:1">{math}</div>{number}</div>'

    markdown = re.sub(r"\$\$(.+?)\$\$", displayed, markdown, flags=re.DOTALL)
    return re.sub(r"(?<![\\`$])\$([^$`]+?)\$", lambda found: convert(found[1].replace("\n", " ")), markdown)


def _link(found: re.Match[str], page: Page, config: MkDocsConfig, files: Files) -> str:
    text, target = found[1], found[2]
    if found.start() and found.string[found.start() - 1] == "!":
        return found[0]
    place = (ROOT / "docs" / Path(page.file.src_uri).parent / target).resolve()
    inside = place.relative_to(ROOT / "docs").as_posix() if place.is_relative_to(ROOT / "docs") else None
    if inside is not None and files.get_file_from_path(inside) is not None:
        return found[0]
    name = text.strip("`")
    if target.endswith(".py") and name in bier._HOME:
        return f"[{text}](python.md#{bier._HOME[name]}.{name})"
    if not place.exists():
        raise PluginError(f"{page.file.src_uri} links to {target}, which does not exist.")
    if config.repo_url:
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{place.relative_to(ROOT).as_posix()})"
    return text
