"""The loops of docs/loops.md run as they are written there, and each of them trains."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import bier
from bier.data import BalancedBatches

PAGE = Path(__file__).parents[1] / "docs" / "loops.md"
TEXT = PAGE.read_text(encoding="utf-8")
BEGINNING, PLAIN, LIGHTNING, LIBRARY, DISTRIBUTED = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)

pytest.importorskip("pytorch_metric_learning")


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def executed(code: str) -> dict[str, Any]:
    """The names that the beginning and this block leave; the backbone of the block has been trained."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(BEGINNING, "loops.md", "exec"), names)
    before = weights(names["backbone"])
    exec(compile(code, "loops.md", "exec"), names)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(names["backbone"]), strict=True))
    return names


def test_plain_pytorch() -> None:
    names = executed(PLAIN)
    assert names["vectors"].shape == (64, 96)
    assert torch.allclose(names["ensemble"].weight.norm(dim=1), torch.ones(96), atol=1e-5)
    fresh = bier.BoostedLoss(names["groups"], names["losses"].ProxyAnchorLoss(8, 96))
    assert [p.shape for p in names["metric"].parameters()] == [p.shape for p in fresh.parameters()]
    assert all(p.grad is not None for p in names["metric"].parameters())


@pytest.mark.filterwarnings("ignore")  # Lightning gives advice in warnings
def test_lightning() -> None:
    pytest.importorskip("lightning")
    trainer = executed(LIGHTNING)["trainer"]
    assert trainer.global_step == 2
    assert {"learner_1", "learner_2", "learner_3"} <= set(trainer.logged_metrics)
    rows = trainer.lightning_module.ensemble.weight.norm(dim=1)
    assert torch.allclose(rows, torch.ones(96), atol=1e-5)


def test_lightning_on_two_processes(tmp_path: Path) -> None:
    """Each process trains on its half of the batches of one process, and both end with the same weights."""
    pytest.importorskip("lightning")
    code = BEGINNING + LIGHTNING.replace('accelerator="cpu"', 'accelerator="cpu", devices=2, strategy="ddp"')
    assert "devices=2" in code
    code = code.replace("torch.rand(64", "torch.arange(64.).view(64, 1, 1, 1) / 64 + 0 * torch.rand(64")
    code = code.replace(
        "features = self", "seen.append((batch[0][:, 0, 0, 0] * 64).int().tolist())\n        features = self"
    )
    code += "import json, os, pathlib, sys\nrank = trainer.global_rank\n"
    code += "last = [p.sum().item() for p in trainer.lightning_module.parameters()]\n"
    code += "pathlib.Path(f'{sys.argv[1]}-{rank}').write_text(json.dumps([seen, last]))\n"
    (tmp_path / "loop.py").write_text("seen = []\n" + code)
    command = [sys.executable, str(tmp_path / "loop.py"), str(tmp_path / "rank")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    (first, weights), (second, others) = (json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in (0, 1))
    assert weights == others
    alone = BalancedBatches(torch.arange(8).repeat_interleave(8), classes=8, images=4, seed=0, seeds=False)
    assert [one + other for one, other in zip(first, second, strict=True)] == [next(alone), next(alone)]


ALONE = """
import sys
class Refusing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in REFUSED:
            raise ImportError(name)
sys.meta_path.insert(0, Refusing())
import bier, torch
z, y = torch.randn(16, 12), torch.arange(4).repeat(4)
ensemble, diverse = bier.EmbeddingEnsemble(12, (4, 8)), bier.ActivationLoss((4, 8))
bier.initialise(ensemble, z, diverse, steps=2)
(bier.BoostedLoss((4, 8))(ensemble(z), y) + diverse(ensemble, z)).backward()
bier.AdversarialLoss((4, 8), hidden=4)(ensemble, z)
print(bier.recall_at_k(z, y, 1), bier.feature_correlation(z), bier.classifier_correlation(z, (4, 8)))
"""


def test_losses_and_metrics_need_torch_and_numpy_alone() -> None:
    project = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in project["dependencies"]}
    # What torch itself needs stays.
    refused = names - {"torch", "numpy", "fsspec", "filelock", "jinja2"} | {
        "PIL",
        "faiss",
        "tensorboard",
    }  # torch's own
    assert {"timm", "pydantic", "rich"} <= refused
    command = [sys.executable, "-W", "ignore", "-c", f"REFUSED = {refused}{ALONE}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # its progress bar
def test_trainer_of_the_library() -> None:
    trainer = executed(LIBRARY)["trainer"]
    assert trainer.epoch == 1
    assert trainer.iteration == 1


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """Both processes end with the same weights, proxies included, although each has drawn other images."""
    save = "from safetensors.torch import save_file; import sys, os\n"
    save += "save_file(model.module.state_dict(), f'{sys.argv[1]}-{os.environ[\"RANK\"]}')\n"
    seed = "import os, torch\ntorch.set_num_threads(1)\ntorch.manual_seed(int(os.environ['RANK']))\n"
    (tmp_path / "loop.py").write_text(seed + BEGINNING + DISTRIBUTED + save)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "loop.py"), str(tmp_path / "weights")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    one, other = (load_file(tmp_path / f"weights-{rank}") for rank in (0, 1))
    assert "metric.loss.learners.2.proxies" in one
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_indices_of_a_miner_go_with_losses_of_the_library() -> None:
    z, labels = torch.randn(4, 6), torch.tensor([0, 0, 1, 1])
    chosen = (torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    with pytest.raises(bier.BierError, match="'indices_tuple' parameter goes with a loss of pytorch-metric-learning"):
        bier.BoostedLoss((2, 4))(z, labels, chosen)


def test_lines_are_wrapped() -> None:
    outside = re.sub(r"```python\n.*?```", "", TEXT, flags=re.DOTALL)
    assert [line for line in outside.splitlines() if len(line) > 100] == []
