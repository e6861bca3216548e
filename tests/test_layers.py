"""Who may import whom. A package may import those on lower layers, and what is named here, and nothing else of ours."""

import ast
import sys
from pathlib import Path

import bier

ROOT = Path(bier.__file__).parent

LAYERS = [
    {"errors", "files", "folders", "system", "distributed"},
    {"config", "method", "images", "runs"},
    {"data", "models", "search"},
    {"evaluate"},
    {"collection"},
    {"training"},
    {"paper", "web"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# The config takes its defaults from the method; a file that cannot be written is an error for the user.
SAME_LAYER = {
    ("config", "method"),
    ("system", "errors"),
    ("distributed", "errors"),
    ("distributed", "system"),
    ("runs", "config"),
    ("files", "errors"),
    ("folders", "files"),
    ("folders", "errors"),
}
FORBIDDEN = {("web", "training"), ("search", "method")}
METHOD_MAY_IMPORT = {"torch", "math", "typing", "collections", "contextlib", "bier", "dataclasses", "warnings"}


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


def not_allowed(path: Path) -> set[str]:
    """The packages that a file imports and must not."""
    importing = package_of(path)
    return {
        other
        for other in (ours(path) - {importing}) & set(LEVEL)  # else a public name of the package itself
        if (LEVEL[other] >= LEVEL[importing] and (importing, other) not in SAME_LAYER)
        or (importing, other) in FORBIDDEN
    }


def test_imports_point_downwards() -> None:
    paths = [path for path in modules() if package_of(path) not in ("__init__", "__main__")]
    assert {package_of(path) for path in paths} <= set(LEVEL)  # every package has a layer
    assert {str(path.relative_to(ROOT)): not_allowed(path) for path in paths if not_allowed(path)} == {}


def test_the_method_imports_torch_and_nothing_else() -> None:
    for path in (ROOT / "method").glob("*.py"):
        allowed = METHOD_MAY_IMPORT
        if path.name == "library.py":  # the losses of one library, built by their names
            allowed = allowed | sys.stdlib_module_names | {"pytorch_metric_learning"}
        assert {name.split(".")[0] for name in imports(path)} <= allowed, path


def test_files_stay_readable() -> None:
    for path in modules():
        assert len(path.read_text().splitlines()) <= 600, path
        assert path.stem not in {"utils", "helpers", "common", "misc"}, path
