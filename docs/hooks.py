"""What MkDocs does for the site beyond the pages of this folder, which stay readable as they are on a code host.

Generated pages: those of the root (README.md as the start page, CONTRIBUTING.md and others), every command, setting and
public Python name. Equations become MathML, so that the site needs no script from another host. A link to a file
outside docs/, such as the function or the test of an equation, leads to a page with that file; a file that does not
exist is an error.
"""

import re
from importlib import import_module
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
from bier.cli.lists import shown
from bier.config import described

ROOT = Path(__file__).parents[1]
OF_THE_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
PACKAGES = {
    "Models and search": ("bier.models", "bier.search"),
    "Training": ("bier.training", "bier.config"),
    "Measuring": ("bier.evaluate",),
    "The method": ("bier.method",),
    "Errors": ("bier.errors",),
}
DATA = [  # what the pages use of the packages below `bier`
    "bier.data.load",
    "bier.data.list_images",
    "bier.data.BalancedBatches",
    "bier.images.ImageDataset",
    "bier.training.Observer",
    "bier.search.open_store",
    "bier.search.rerank.rerank",
]
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
FROM_ROOT = re.compile(r"\]\((?!docs/|https?:|#|mailto:)")
IMAGE = re.compile(r'(<img src=")docs/')


class Readable(griffe.Extension):  # type: ignore[misc]
    """`Example:` of our docstrings is shown as code only under `Examples:`; a default shows its value, not its name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
        if obj.is_function:
            for parameter in obj.parameters:
                parameter.default = _value(parameter.default, obj.module.path)
        elif obj.is_attribute and obj.parent.is_class:  # the field of a dataclass
            obj.value = _value(obj.value, obj.module.path)


def _value(default: Any, module: str) -> Any:
    """What a constant such as defaults.COST stands for in this module."""
    if not re.fullmatch(r"(\w+\.)?[A-Z][A-Z0-9_]*", str(default)):
        return default
    found: Any = import_module(module)
    for name in str(default).split("."):
        found = getattr(found, name)
    return repr(found)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {page: _from_root(name) for name, page in OF_THE_ROOT.items()}
    pages |= {"commands.md": _commands(), "python.md": _python(), "all-settings.md": _settings()}
    for text in [*pages.values(), *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))]:
        for link in LINK.finditer(text):
            pages |= _source((ROOT / "docs" / link[2]).resolve())
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith("source/"):
        return markdown
    if "$$" in markdown:
        markdown = _equations(markdown)
    return LINK.sub(lambda link: _link(link, page, files), markdown)


def _from_root(name: str) -> str:
    """A page of the root, its links as seen from docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for other, page in OF_THE_ROOT.items():
        text = text.replace(f"]({other})", f"](docs/{page})")
    text = FROM_ROOT.sub("](../", text)
    return IMAGE.sub(r"\1", text.replace("](docs/", "]("))


def _source(place: Path) -> dict[str, str]:
    """A page with a file that is outside docs/."""
    known = place.is_relative_to(ROOT / "docs") or (place.parent == ROOT and place.name in OF_THE_ROOT)
    if known or not place.is_file():
        return {}
    name = place.relative_to(ROOT).as_posix()
    code = f"`````{{.python linenums=1}}\n{place.read_text(encoding='utf-8')}`````"
    return {f"source/{name}.md": f"---\nsearch:\n  exclude: true\n---\n# {place.name}\n\n`{name}`\n\n{code}\n"}


def _commands() -> str:
    """typer's own documentation of every command, with its examples as code."""
    command: Any = typer.main.get_command(app)
    context = typer.Context(command, info_name="bier")
    text = get_docs_for_click(obj=command, ctx=context, name="bier", title="Commands")
    text = re.sub(r"\[/?bold\]", "**", text).replace("\\[", "[")
    text = re.sub(r"^ *((?:torchrun .*)?bier [a-z].*)$", r"    \1", text, flags=re.MULTILINE)
    text = re.sub(r"^\* `--help`.*\n", "", text, flags=re.MULTILINE)
    # The table of contents lists the commands, and in full.
    return re.sub(r"\*\*(Commands|Options)\*\*:\n\n((\* `[a-z]+`: .*\n)+|(?=\n))", "", text)


def _python() -> str:
    """Every name of `bier`, from the docstrings of the modules that define them."""
    text = "# Python\n\nThe names of `import bier`, and at the end those of its packages that these pages use.\n"
    for title, packages in PACKAGES.items():
        names = sorted(name for name, home in bier._HOME.items() if home.startswith(packages))
        text += f"\n## {title}\n" + "".join(f"\n::: {bier._HOME[name]}.{name}\n" for name in names)
    full = "\n    options:\n      show_root_full_path: true\n"
    return text + "\n## Data and other packages\n" + "".join(f"\n::: {name}{full}" for name in DATA)


def _settings() -> str:
    """What `bier settings` prints."""
    text = "# Settings\n\nEvery setting of `bier train --set SECTION.KEY=VALUE`, as `bier settings` lists them.\n"
    section = ""
    for key, one in described().items():
        if "." in key and section != (section := key.partition(".")[0]):
            text += f"\n## {section}\n\n"
        text += f"- `{key}` = `{shown(one.default)}`: {one.about}; {one.allowed}\n"
    return text


def _equations(markdown: str) -> str:
    """$$…$$ and $…$ as MathML; the number of an equation stands at its right."""

    def displayed(found: re.Match[str]) -> str:
        latex = found[1]
        tag = re.search(r"\\tag\{([^}]*)\}", latex)
        number = f"<span>({tag[1]})</span>" if tag else ""
        math = convert(re.sub(r"\\tag\{[^}]*\}", "", latex).strip(), display="block")
        return f'<div class="equation"><div>{math}</div>{number}</div>'

    def inline(found: re.Match[str]) -> str:
        """In a span: Markdown would take <math> at the start of a line for a paragraph of its own."""
        return "<span>" + convert(found[1].replace("\n", " ")) + "</span>"

    markdown = re.sub(r"\$\$(.+?)\$\$", displayed, markdown, flags=re.DOTALL)
    return re.sub(r"(?<![\\`$])\$([^$`]+?)\$", inline, markdown)


def _link(found: re.Match[str], page: Page, files: Files) -> str:
    text, target = found[1], found[2]
    if found.start() and found.string[found.start() - 1] == "!":
        return found[0]
    place = (ROOT / "docs" / Path(page.file.src_uri).parent / target).resolve()
    inside = place.relative_to(ROOT / "docs").as_posix() if place.is_relative_to(ROOT / "docs") else None
    if place.parent == ROOT and place.name in OF_THE_ROOT:
        return f"[{text}]({OF_THE_ROOT[place.name]}{found[3] or ''})"
    if inside is not None and files.get_file_from_path(inside) is not None:
        return found[0]
    name = text.strip("`")
    if target.endswith(".py") and name in bier._HOME:
        return f"[{text}](python.md#{bier._HOME[name]}.{name})"
    if not place.is_file() and place.parent == ROOT / "docs" / "results":
        return text  # written by a run of hours, such as `make soak`
    if not place.is_file():
        raise PluginError(f"{page.file.src_uri} links to {target}, which does not exist.")
    # MkDocs does not know the lines of code as anchors, and would warn of them in a link of its own.
    address = f"source/{place.relative_to(ROOT).as_posix()}.html#__codelineno-0-{_line(place, name)}"
    return f'<a href="{address}">{text}</a>'


def _line(place: Path, name: str) -> int:
    """Where a file defines `Class.method`, or 1."""
    code, start = place.read_text(encoding="utf-8"), 0
    for part in name.split("."):
        found = re.compile(rf"^ *(?:async )?(?:def|class) {re.escape(part)}\b", re.MULTILINE).search(code, start)
        start = found.start() if found else start
    return code.count("\n", 0, start) + 1
