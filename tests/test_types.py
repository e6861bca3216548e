"""What a type checker and completion see of the package."""

import subprocess
import sys
from pathlib import Path

import bier

SCRIPT = """
import bier
import bier.images
import bier.training
print(bier.Model, bier.images.open_image, bier.training.train)
bier.Modle
bier.images.open_imgae
bier.training.trian
"""


def test_a_typo_is_an_error_for_a_type_checker(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "error" in line and "script.py" in line]
    assert [line.split(":")[1] for line in lines] == ["6", "7", "8"], done.stdout


def test_completion_lists_the_public_names() -> None:
    assert {"Model", "load", "train", "__version__"} <= set(dir(bier))
    assert "Modle" not in dir(bier)
