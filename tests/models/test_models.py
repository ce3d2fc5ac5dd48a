# SPDX-License-Identifier: Apache-2.0
"""Every shipped model against transformers on the meta device, name by name and shape by shape."""

from __future__ import annotations

import re

import pytest

from nccl_m2n.models import Manifest
from nccl_m2n.models.catalogue import MODELS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def reference(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's parameters by transformers, as checkpoints store them."""
    values = {
        key: list(v) if isinstance(v, tuple) else v for key, v in config.items() if key != "torch_dtype"
    }
    family = str(values.pop("model_type"))
    family = {"kimi_k2": "deepseek_v3"}.get(family, family)
    kind = transformers.AutoModel if family == "bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(transformers.AutoConfig.for_model(family, **values))
    stored: dict[str, tuple[int, ...]] = {}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    for name, tensor in model.state_dict().items():
        if name not in tied:
            stored.update(
                expand(name, tuple(tensor.shape)) if family != "gpt_oss" else {name: tuple(tensor.shape)}
            )
    return stored


def expand(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """transformers 5 keeps a layer's experts in one tensor; checkpoints keep each projection by itself."""
    at, _, kind = name.rpartition(".experts.")
    if kind == "gate_up_proj":
        experts, rows, columns = shape
        parts = {"gate_proj": (rows // 2, columns), "up_proj": (rows // 2, columns)}
    elif kind == "down_proj":
        experts, parts = shape[0], {"down_proj": shape[1:]}
    else:
        return {name: shape}
    return {f"{at}.experts.{e}.{part}.weight": s for e in range(experts) for part, s in parts.items()}


@pytest.mark.parametrize("name", MODELS)
def test_shipped_models_are_what_transformers_builds(name: str) -> None:
    manifest = Manifest.named(name)
    ours = {key: info.shape for key, info in manifest.items()}
    layers = MODELS[name]["num_hidden_layers"]
    # transformers builds no prediction layers; the published checkpoints have them behind the others.
    ours = {key: shape for key, shape in ours.items() if not key.startswith(f"model.layers.{layers}.")}
    assert ours == reference(MODELS[name])


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("Llama-3.1-8B", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("Llama-3.1-8B", {"head_dim": 96}),
        ("Qwen2.5-7B", {"tie_word_embeddings": True}),
        ("Qwen2.5-7B", {"model_type": "qwen3", "head_dim": 128}),
        ("Qwen3-30B-A3B", {"mlp_only_layers": (1,), "decoder_sparse_step": 2, "tie_word_embeddings": True}),
        ("DeepSeek-V3", {"q_lora_rank": None, "n_shared_experts": 2, "attention_bias": True}),
    ],
)
def test_the_variants_of_a_family(base: str, changes: dict[str, object]) -> None:
    config = MODELS[base] | changes | {"num_hidden_layers": 4, "num_nextn_predict_layers": 0}
    assert {k: i.shape for k, i in Manifest.from_config(config).items()} == reference(config)


def test_prediction_layers_have_the_published_names() -> None:
    manifest = Manifest.named("DeepSeek-V3")
    extra = [key for key in manifest if key.startswith("model.layers.61.")]
    outside = {re.sub(r"^model\.layers\.61\.", "", key): manifest[key].shape for key in extra}
    layer = {
        re.sub(r"^model\.layers\.60\.", "", key) for key in manifest if key.startswith("model.layers.60.")
    }
    assert {key: outside[key] for key in outside.keys() - layer} == {
        "embed_tokens.weight": (129280, 7168),
        "enorm.weight": (7168,),
        "hnorm.weight": (7168,),
        "eh_proj.weight": (7168, 14336),
        "shared_head.norm.weight": (7168,),
        "shared_head.head.weight": (129280, 7168),
    }
    assert layer <= outside.keys()
