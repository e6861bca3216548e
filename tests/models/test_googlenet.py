"""BVLC GoogLeNet against OpenCV's Caffe importer on random weights, and its weight files against damage and malice."""

from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bier.errors import ModelError
from bier.models.backbone import Backbone
from bier.models.backbones import build_backbone
from bier.models.googlenet import INCEPTIONS, convolutions, read_caffemodel

Layers = Mapping[str, tuple[np.ndarray, np.ndarray]]


class Prototxt:
    """Caffe's description of the network, written layer by layer as in the model zoo."""

    def __init__(self) -> None:
        self.text = 'name: "GoogleNet"\ninput: "data"\ninput_shape { dim: 2 dim: 3 dim: 224 dim: 224 }\n'

    def layer(self, name: str, kind: str, bottoms: list[str], settings: str = "", top: str | None = None) -> str:
        inputs = " ".join(f'bottom: "{bottom}"' for bottom in bottoms)
        self.text += f'layer {{ name: "{name}" type: "{kind}" {inputs} top: "{top or name}" {settings} }}\n'
        return top or name

    def convolution(self, name: str, bottom: str, outputs: int, kernel: int, stride: int = 1) -> str:
        shape = f"num_output: {outputs} kernel_size: {kernel} stride: {stride} pad: {kernel // 2}"
        made = self.layer(name, "Convolution", [bottom], f"convolution_param {{ {shape} }}")
        head, tail = name.split("/")
        return self.layer(f"{head}/relu_{tail}", "ReLU", [made], top=made)

    def pool(self, name: str, bottom: str, settings: str) -> str:
        return self.layer(name, "Pooling", [bottom], f"pooling_param {{ {settings} }}")

    def norm(self, name: str, bottom: str) -> str:
        return self.layer(name, "LRN", [bottom], "lrn_param { local_size: 5 alpha: 0.0001 beta: 0.75 }")

    def inception(self, name: str, bottom: str) -> str:
        _, one, reduce3, three, reduce5, five, project = INCEPTIONS[name]
        head = f"inception_{name}"
        tops = [
            self.convolution(f"{head}/1x1", bottom, one, 1),
            self.convolution(f"{head}/3x3", self.convolution(f"{head}/3x3_reduce", bottom, reduce3, 1), three, 3),
            self.convolution(f"{head}/5x5", self.convolution(f"{head}/5x5_reduce", bottom, reduce5, 1), five, 5),
        ]
        pooled = self.pool(f"{head}/pool", bottom, "pool: MAX kernel_size: 3 stride: 1 pad: 1")
        tops.append(self.convolution(f"{head}/pool_proj", pooled, project, 1))
        return self.layer(f"{head}/output", "Concat", tops)


def prototxt() -> str:
    halve = "pool: MAX kernel_size: 3 stride: 2"
    net = Prototxt()
    top = net.pool("pool1/3x3_s2", net.convolution("conv1/7x7_s2", "data", 64, 7, 2), halve)
    top = net.convolution("conv2/3x3_reduce", net.norm("pool1/norm1", top), 64, 1)
    top = net.norm("conv2/norm2", net.convolution("conv2/3x3", top, 192, 3))
    top = net.pool("pool2/3x3_s2", top, halve)
    for name in INCEPTIONS:
        if name in ("4a", "5a"):
            top = net.pool(f"pool{int(name[0]) - 1}/3x3_s2", top, halve)
        top = net.inception(name, top)
    net.pool("pool5/7x7_s1", top, "pool: AVE kernel_size: 7 stride: 1")
    return net.text


@pytest.fixture(scope="module")
def layers() -> Layers:
    """Random weights under Caffe's names, large enough that no layer dies out."""
    random = np.random.default_rng(0)
    found = {}
    for name, convolution in convolutions(build_backbone("googlenet-bvlc", pretrained=False)).items():
        shape = tuple(convolution.weight.shape)
        weight = random.normal(0, (2 / np.prod(shape[1:])) ** 0.5, shape)
        found[name] = (weight.astype(np.float32), random.normal(0, 0.5, shape[:1]).astype(np.float32))
    return found


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number: int, content: bytes | int) -> bytes:
    """A field of a protobuf message."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def caffemodel(layers: Layers, *, old: bool = False) -> bytes:
    kind, name_field, blob_field = (2, 4, 6) if old else (100, 1, 7)
    written = field(1, b"a network")
    for name, blobs in layers.items():
        layer = field(name_field, name.encode())
        for blob in blobs:
            full = (1,) * (4 - blob.ndim) + blob.shape
            sides = b"".join(field(number, side) for number, side in enumerate(full, 1))
            shape = field(7, field(1, b"".join(map(varint, blob.shape))))
            layer += field(blob_field, field(5, blob.astype("<f4").tobytes()) + (sides if old else shape))
        written += field(kind, layer)
    return written


def our_layers(backbone: Backbone, pixels: Tensor) -> dict[str, Tensor]:
    """What each of our layers gives, under Caffe's names."""
    parents = {module[0]: module for module in backbone.modules() if isinstance(module, nn.Sequential)}
    # The first convolutions of three paths of a block are one; what they give is seen in the convolutions behind them
    # and in the block's output.
    merged = tuple(f"inception_{block}/{name}" for block in INCEPTIONS for name in ("1x1", "3x3_reduce", "5x5_reduce"))
    apart = {name: c for name, c in convolutions(backbone).items() if name not in merged}
    watched: dict[str, nn.Module] = {name: parents[c] for name, c in apart.items()}
    stages = dict(zip(backbone.stages, backbone.body.layers, strict=True))
    caffe_names = {"pool1": "pool1/3x3_s2", "norm1": "pool1/norm1", "norm2": "conv2/norm2", "pool2": "pool2/3x3_s2"}
    watched |= {name: stages["stem"].get_submodule(part) for part, name in caffe_names.items()}
    pools = {name: stages[f"inception_{name}"].halve for name in INCEPTIONS}
    watched |= {"pool3/3x3_s2": pools["3b"], "pool4/3x3_s2": pools["4e"]}
    watched |= {"pool5/7x7_s1": stages["head"][0]}  # type: ignore[index]
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> object:
        return lambda _module, _inputs, output: seen.__setitem__(name, output.clone())

    def keep_input(name: str) -> object:
        return lambda _module, inputs: seen.__setitem__(f"inception_{name}/output", inputs[0].clone())

    hooks = [module.register_forward_hook(keep(name)) for name, module in watched.items()]  # type: ignore[arg-type]
    hooks += [pool.register_forward_pre_hook(keep_input(name)) for name, pool in pools.items()]  # type: ignore[arg-type]
    with torch.no_grad():
        backbone(pixels)
    for hook in hooks:
        hook.remove()
    return seen


def test_layer_by_layer_against_opencv(layers: Layers, tmp_path: Path) -> None:
    (tmp_path / "bvlc_googlenet.caffemodel").write_bytes(caffemodel(layers))
    backbone = build_backbone("googlenet-bvlc", weights=tmp_path / "bvlc_googlenet.caffemodel").eval()
    pixels = np.random.default_rng(1).integers(0, 256, (2, 3, 224, 224), dtype=np.uint8)
    ours = our_layers(backbone, torch.from_numpy(pixels))
    assert len(ours) == 57 - 27 + 4 + 9 + 3

    (tmp_path / "deploy.prototxt").write_text(prototxt())
    referee = cv2.dnn.readNetFromCaffe(str(tmp_path / "deploy.prototxt"), str(tmp_path / "bvlc_googlenet.caffemodel"))
    referee.enableFusion(False)
    bgr = pixels[:, ::-1].astype(np.float32) - np.array([104, 117, 123], np.float32).reshape(1, 3, 1, 1)
    referee.setInput(np.ascontiguousarray(bgr))
    relu = {name: name.replace("/", "/relu_") for name in layers}
    outputs = referee.forward([relu.get(name, name) for name in ours])
    for (name, mine), theirs in zip(ours.items(), outputs, strict=True):
        scale = float(np.abs(theirs).max())
        assert scale > 0, name
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-3, atol=1e-4 * scale, err_msg=name)
    with torch.no_grad():
        np.testing.assert_allclose(
            backbone(torch.from_numpy(pixels)), outputs[-1].reshape(2, 1024), rtol=1e-3, atol=1e-3
        )


def test_the_older_layer_format_holds_the_same(layers: Layers, tmp_path: Path) -> None:
    (tmp_path / "new.caffemodel").write_bytes(caffemodel(layers))
    (tmp_path / "old.caffemodel").write_bytes(caffemodel(layers, old=True))
    expected = build_backbone("googlenet-bvlc", weights=tmp_path / "new.caffemodel").state_dict()
    found = build_backbone("googlenet-bvlc", weights=tmp_path / "old.caffemodel").state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_files_that_do_not_fit(layers: Layers, tmp_path: Path) -> None:
    path = tmp_path / "w.caffemodel"
    with pytest.raises(ModelError, match=r"weights=FILE: bvlc_googlenet\.caffemodel"):
        build_backbone("googlenet-bvlc")
    with pytest.raises(ModelError, match="readable Caffe model"):
        read_caffemodel(path)
    path.write_bytes(caffemodel(layers)[:-3])
    with pytest.raises(ModelError, match="readable Caffe model"):
        read_caffemodel(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="Found no layer"):
        read_caffemodel(path)
    path.write_bytes(caffemodel({k: v for k, v in layers.items() if k != "inception_4c/3x3"}))
    with pytest.raises(ModelError, match="inception_4c/3x3"):
        build_backbone("googlenet-bvlc", weights=path)
    path.write_bytes(
        caffemodel({**layers, "conv2/3x3": (np.zeros((192, 64, 1, 1), np.float32), np.zeros(192, np.float32))})
    )
    with pytest.raises(ModelError, match=r"conv2/3x3.*must have the shapes"):
        build_backbone("googlenet-bvlc", weights=path)
