"""Which backbones there are: size, cost, licence, whether their weights are on this machine, and how fast they are."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from bier import system
from bier.errors import ModelError
from bier.models.backbone import Backbone, autocast
from bier.models.backbones import FROM_SCRATCH, LITE, build_backbone
from bier.models.googlenet import NAME as GOOGLENET
from bier.models.timm_models import is_cached, package_of

OWN = (*LITE, GOOGLENET, *FROM_SCRATCH)
# Weights that are worth a first try, by family; `bier backbones PATTERN` shows all others of timm.
FAMILIES: dict[str, tuple[str, ...]] = {
    "MobileNet": ("mobilenetv4_conv_small.e2400_r224_in1k", "mobilenetv3_large_100.miil_in21k_ft_in1k"),
    "EfficientNet": ("efficientnet_b0.ra_in1k", "tf_efficientnetv2_b0.in1k", "tf_efficientnetv2_s.in21k"),
    "ResNet": ("resnet18.a1_in1k", "resnet50.a1_in1k"),
    "RegNet": ("regnety_016.tv2_in1k",),
    "ConvNeXt": ("convnext_atto.d2_in1k", "convnext_tiny.fb_in22k"),
    "FastViT": ("fastvit_t8.apple_in1k",),
    "TinyViT": ("tiny_vit_5m_224.dist_in22k",),
    "Swin": ("swin_tiny_patch4_window7_224.ms_in22k",),
    "ViT": ("vit_tiny_patch16_224.augreg_in21k", "vit_small_patch16_224.augreg_in21k"),
    "DINO": ("vit_small_patch16_224.dino", "vit_base_patch16_224.dino"),
    "DINOv2": ("vit_small_patch14_dinov2.lvd142m", "vit_base_patch14_dinov2.lvd142m"),
    "DINOv3": ("vit_small_patch16_dinov3.lvd1689m", "vit_base_patch16_dinov3.lvd1689m"),
    "CLIP": ("vit_base_patch16_clip_224.openai", "vit_large_patch14_clip_224.openai"),
    "SigLIP": ("vit_base_patch16_siglip_224.webli",),
    "EVA": ("eva02_tiny_patch14_224.mim_in22k",),
}
_FAMILY_OF = {name: family for family, names in FAMILIES.items() for name in names}
# From the LICENSE files of the packages and from the readme of the BVLC model; timm's weights name their own.
_LICENCES = {**dict.fromkeys(LITE, "apache-2.0"), GOOGLENET: "unrestricted"}


@dataclass(frozen=True)
class BackboneInfo:
    """One row of `bier backbones`.

    gflops: multiply-adds per image in thousand millions, at `resolution`, counted as papers do: a multiply-add is one.
    weights: `here` (on this machine), `hub` (fetched when used), `package` (bier-ml[lite] installs them), `file` (set
        model.weights) or `none` (from scratch).
    stages: values of model.trainable_from.
    """

    name: str
    family: str
    parameters: int
    gflops: float
    resolution: int
    features: int
    licence: str | None
    weights: str
    stages: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "stages": list(self.stages)}


def names(pattern: str | None = None) -> list[str]:
    """The named backbones and the first choices of timm's families, or all that fit a pattern such as *dinov2*."""
    if pattern is None:
        return [*OWN, *_FAMILY_OF]
    found = [name for name in OWN if name == pattern]
    wide = pattern if any(sign in pattern for sign in "*?[.") else f"{pattern}*"
    found += timm.list_pretrained(wide)
    if not found:
        raise ModelError(
            f"No backbone with weights has a name like {pattern!r}. Try a pattern such as '*dinov2*' or 'resnet*'."
        )
    return found


def describe(name: str, resolution: int = 0) -> BackboneInfo:
    """What is known about a backbone without its weights; nothing of its size is allocated."""
    try:
        with torch.device("meta"):
            backbone = build_backbone(name, pretrained=False, resolution=resolution)
    except (RuntimeError, NotImplementedError):  # some networks of timm compute with values while they are built
        backbone = build_backbone(name, pretrained=False, resolution=resolution).to("meta")
    return BackboneInfo(
        name,
        _FAMILY_OF.get(name, "" if name in OWN else type_of(name)),
        sum(parameter.numel() for parameter in backbone.parameters()),
        _gflops(backbone),
        backbone.crop,
        backbone.features,
        licence(name),
        where(name),
        backbone.stages,
    )


def type_of(name: str) -> str:
    """The family by the name of timm's module, such as vision_transformer."""
    module: str = timm.model_entrypoint(name).__module__
    return module.rpartition(".")[2]


def licence(name: str) -> str | None:
    """None where it is not known."""
    if name in OWN:
        return _LICENCES.get(name)
    config = timm.get_pretrained_cfg(name)
    return config.license if config else None


def where(name: str) -> str:
    """Where the pretrained weights are: here, hub, package, file or none."""
    if name in FROM_SCRATCH:
        return "none"
    if name == GOOGLENET:
        return "file"
    if name in LITE:
        return "here" if find_spec(package_of(name)) else "package"
    return "here" if is_cached(name) else "hub"


def _gflops(backbone: Backbone) -> float:
    side = backbone.crop
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        backbone.requires_grad_(False).eval()(torch.zeros(1, 3, side, side, dtype=torch.uint8, device="meta"))
    return counter.get_total_flops() / 2e9


TIMED_SECONDS, TIMED_BATCH = 2.0, 16


def images_per_second(
    name: str, resolution: int = 0, seconds: float = TIMED_SECONDS, device: torch.device | None = None
) -> tuple[float, float]:
    """(frozen, trained): images per second through the network, and forwards and backwards, measured on this machine.

    Weights are random, which takes the same time, and precision is `auto`. Decoding and the losses are not included.
    """
    device = device or system.device()
    backbone = build_backbone(name, pretrained=False, resolution=resolution).to(device)
    side = backbone.crop
    pixels = torch.randint(0, 256, (TIMED_BATCH, 3, side, side), dtype=torch.uint8, device=device)

    def frozen() -> None:
        with torch.inference_mode(), autocast("auto", device):
            backbone(pixels)

    def trained() -> None:
        with autocast("auto", device):
            features = backbone(pixels)
        features.float().square().mean().backward()
        backbone.zero_grad(set_to_none=True)

    backbone.eval()
    frozen_rate = _rate(frozen, seconds, device)
    backbone.train()
    return frozen_rate, _rate(trained, seconds, device)


def _rate(work: Callable[[], None], seconds: float, device: torch.device) -> float:
    """Images per second over so many seconds, at least one pass, after a first one that asks for memory."""
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    passes, began = 0, time.perf_counter()
    while passes == 0 or time.perf_counter() - began < seconds:
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        passes += 1
    return TIMED_BATCH * passes / (time.perf_counter() - began)
