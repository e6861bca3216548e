"""LoRA on the attention of a backbone, by the package `peft`: small matrices are trained, and merged at the end.

"LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685
"""

import re
from copy import deepcopy

from bier.errors import ModelError, needs
from bier.models.backbone import Backbone

# Names of the linear layers of attention in timm.
ATTENTION = r".*\battn\.(qkv|q|k|v|kv|q_proj|k_proj|v_proj|proj)"


def adapt(backbone: Backbone, rank: int) -> None:
    """Freeze all weights and give each attention layer of the stages that were trainable a pair of small matrices."""
    peft = needs("peft", "lora")
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ATTENTION)
    found = 0
    for layer in backbone.body.layers:
        trainable = any(parameter.requires_grad for parameter in layer.parameters())
        layer.requires_grad_(False)
        if trainable and any(re.fullmatch(ATTENTION, name) for name, _ in layer.named_modules()):
            peft.inject_adapter_in_model(settings, layer)
            found += 1
    if not found:
        raise ModelError(
            f"LoRA needs a backbone with attention in the stages that are trained. Got {backbone.name!r}, "
            "which has none there; set model.adapt=none."
        )
    backbone.train(backbone.training)


def merged(backbone: Backbone) -> Backbone:
    """The backbone with the small matrices added to the weights: a plain copy, or itself where it has none."""
    if not any(hasattr(module, "get_base_layer") for module in backbone.modules()):
        return backbone
    plain = deepcopy(backbone)
    for name, module in list(plain.named_modules()):
        if hasattr(module, "get_base_layer"):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, module.get_base_layer())
    for layer in plain.body.layers:
        vars(layer).pop("peft_config", None)
    return plain
