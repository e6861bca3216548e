"""Who may import whom. A package may import those on lower layers, and what is named here, and nothing else of ours."""

import ast
import sys
from pathlib import Path

import pytest

import bier

ROOT = Path(bier.__file__).parent

LAYERS = [
    {"errors", "files", "memory", "distributed"},
    {"config", "method", "images"},
    {"data", "models", "search"},
    {"evaluate"},
    {"collection"},
    {"training"},
    {"paper", "web"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# The config takes its defaults from the method; a file that cannot be written is an error for the user.
SAME_LAYER = {("config", "method"), ("files", "errors")}
FORBIDDEN = {("web", "training"), ("search", "method")}
METHOD_MAY_IMPORT = {"torch", "math", "typing", "collections", "bier", "dataclasses", "warnings"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("bier.")} - {"__version__"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    me = package_of(path)
    if me in ("__init__", "__main__"):
        return
    for other in ours(path) - {me}:
        if other not in LEVEL:
            continue  # a public name of the package itself
        allowed = LEVEL[other] < LEVEL[me] or (me, other) in SAME_LAYER
        assert allowed, f"{path.relative_to(ROOT)} imports bier.{other}"
        assert (me, other) not in FORBIDDEN, f"{path.relative_to(ROOT)} imports bier.{other}"


@pytest.mark.parametrize("path", sorted((ROOT / "method").glob("*.py")), ids=lambda p: p.name)
def test_the_method_imports_torch_and_nothing_else(path: Path) -> None:
    may = METHOD_MAY_IMPORT
    if path.name == "library.py":  # the losses of one library, built by their names
        may = may | sys.stdlib_module_names | {"pytorch_metric_learning"}
    assert {name.split(".")[0] for name in imports(path)} <= may


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600
    assert path.stem not in {"utils", "helpers", "common", "misc"}


def test_every_package_has_a_layer() -> None:
    packages = {package_of(path) for path in modules()} - {"__init__", "__main__"}
    assert packages <= set(LEVEL)
