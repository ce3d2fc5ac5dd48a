# SPDX-License-Identifier: Apache-2.0
"""Small models of each family in Hugging Face form, and the storage of each framework written by plain NumPy.

Nothing here uses the package's layouts, rules or parallel sizes: it is what they are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nccl_m2n.models import Manifest

Arrays = dict[str, np.ndarray[Any, Any]]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "mlp_only_layers": (1,),
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_attention_heads": 8,
    "q_lora_rank": 10,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_local_experts": 8}


def manifest_of(config: dict[str, Any]) -> Manifest:
    """The model's manifest; `unstack` in a configuration takes GPT-OSS's experts one by one."""
    manifest = Manifest.from_config(config)
    return manifest.unstack() if config.get("unstack") else manifest


def full_model(config: dict[str, Any]) -> tuple[Manifest, Arrays]:
    """The model's manifest and its tensors; every element of the whole model has another value."""
    manifest = manifest_of(config)
    arrays, at = {}, 1
    for name, info in manifest.items():
        arrays[name] = np.arange(at, at + info.size, dtype=np.int64).reshape(info.shape)
        at += info.size
    return manifest, arrays


@dataclass
class Rank:
    """One rank's coordinates, by the frameworks' own arithmetic."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0

    @classmethod
    def megatron(cls, rank: int, tp: int, pp: int, ep: int, etp: int, data: int) -> Rank:
        """Megatron: tp fastest, then data (with cp), pp slowest; experts: etp, ep, the rest, pp."""
        inside, pp_rank = rank % (tp * data), rank // (tp * data)
        return cls(tp, inside % tp, pp, pp_rank, ep, inside // etp % ep, etp, inside % etp)

    @classmethod
    def vllm(cls, rank: int, tp: int, pp: int, dp: int, expert_parallel: bool) -> Rank:
        """vLLM: tp fastest, then pp, dp slowest; experts over a stage's tp × dp ranks, or divided by them."""
        tp_rank, pp_rank, dp_rank = rank % tp, rank // tp % pp, rank // (tp * pp)
        flat, size = dp_rank * tp + tp_rank, dp * tp
        if expert_parallel:
            return cls(tp, tp_rank, pp, pp_rank, size, flat, 1, 0)
        return cls(tp, tp_rank, pp, pp_rank, 1, 0, size, flat)


def cut(array: np.ndarray[Any, Any], dim: int, rank: int, ranks: int) -> np.ndarray[Any, Any]:
    """An equal share."""
    assert array.shape[dim] % ranks == 0
    return np.split(array, ranks, axis=dim)[rank]


def padded_share(array: np.ndarray[Any, Any], rows: int, rank: int, ranks: int) -> np.ndarray[Any, Any]:
    """A share of a vocabulary padded with -1."""
    pad = np.full((rows - array.shape[0], array.shape[1]), -1, array.dtype)
    return cut(np.concatenate([array, pad]), 0, rank, ranks)


def stage_layers(layers: int, pp: int, pp_rank: int) -> range:
    """Even stages."""
    return range(layers * pp_rank // pp, layers * (pp_rank + 1) // pp)


# --- Megatron-Core ---


def megatron_state(
    full: Arrays, config: dict[str, Any], at: Rank, padded: int, style: str = "grouped"
) -> Arrays:
    """One rank's arrays as Megatron-Core keeps them; `style` of experts: grouped, sequential or legacy."""
    layers, tied = config["num_hidden_layers"], "lm_head.weight" not in full
    extra = config.get("num_nextn_predict_layers", 0)
    last, state = at.pp_rank == at.pp - 1, {}

    def vocabulary(name: str) -> np.ndarray[Any, Any]:
        return padded_share(full[name], padded, at.tp_rank, at.tp)

    if at.pp_rank == 0:
        state["embedding.word_embeddings.weight"] = vocabulary("model.embed_tokens.weight")
    if (
        last and extra
    ):  # a prediction layer needs the embedding; the model has its copy under the layer's name
        state["embedding.word_embeddings.weight"] = vocabulary(f"model.layers.{layers}.embed_tokens.weight")
    for local, layer in enumerate(stage_layers(layers, at.pp, at.pp_rank)):
        for key, value in megatron_layer(full, config, at, f"model.layers.{layer}.", style).items():
            state[f"decoder.layers.{local}.{key}"] = value
    if last:
        state["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not tied:
            state["output_layer.weight"] = vocabulary("lm_head.weight")
        elif at.pp > 1:
            state["output_layer.weight"] = vocabulary("model.embed_tokens.weight")
        for n in range(extra):
            layer_at, here = f"mtp.layers.{n}.", f"model.layers.{layers + n}."
            for key, value in megatron_layer(full, config, at, here, style).items():
                state[f"{layer_at}transformer_layer.{key}"] = value
            for key in ("enorm", "hnorm"):
                state[f"{layer_at}{key}.weight"] = full[f"{here}{key}.weight"]
            state[f"{layer_at}eh_proj.weight"] = cut(full[f"{here}eh_proj.weight"], 0, at.tp_rank, at.tp)
            state[f"{layer_at}final_layernorm.weight"] = full[f"{here}shared_head.norm.weight"]
    return state


def megatron_layer(full: Arrays, config: dict[str, Any], at: Rank, here: str, style: str) -> Arrays:
    state: Arrays = {}

    def column(name: str) -> np.ndarray[Any, Any]:
        return cut(full[here + name], 0, at.tp_rank, at.tp)

    def row(name: str) -> np.ndarray[Any, Any]:
        return cut(full[here + name], 1, at.tp_rank, at.tp)

    attn = "self_attention."
    state[f"{attn}linear_proj.weight"] = row("self_attn.o_proj.weight")
    if f"{here}self_attn.kv_b_proj.weight" in full:
        state["input_layernorm.weight"] = full[f"{here}input_layernorm.weight"]
        state[f"{attn}linear_q_down_proj.weight"] = full[f"{here}self_attn.q_a_proj.weight"]
        state[f"{attn}linear_q_up_proj.weight"] = column("self_attn.q_b_proj.weight")
        state[f"{attn}linear_q_up_proj.layer_norm_weight"] = full[f"{here}self_attn.q_a_layernorm.weight"]
        state[f"{attn}linear_kv_down_proj.weight"] = full[f"{here}self_attn.kv_a_proj_with_mqa.weight"]
        state[f"{attn}linear_kv_up_proj.weight"] = column("self_attn.kv_b_proj.weight")
        state[f"{attn}linear_kv_up_proj.layer_norm_weight"] = full[f"{here}self_attn.kv_a_layernorm.weight"]
    else:
        state[f"{attn}linear_qkv.layer_norm_weight"] = full[f"{here}input_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{here}self_attn.q_proj.{kind}" in full:
                state[f"{attn}linear_qkv.{kind}"] = interleave(full, config, at, here, kind)
        for part in "qk":
            if f"{here}self_attn.{part}_norm.weight" in full:
                state[f"{attn}{part}_layernorm.weight"] = full[f"{here}self_attn.{part}_norm.weight"]
    for key, name in (("core_attention.softmax_offset", "sinks"), ("linear_proj.bias", "o_proj.bias")):
        if f"{here}self_attn.{name}" in full:
            array = full[f"{here}self_attn.{name}"]
            state[attn + key] = cut(array, 0, at.tp_rank, at.tp) if name == "sinks" else array
    norm = full[f"{here}post_attention_layernorm.weight"]
    if f"{here}mlp.router.weight" in full:
        state["pre_mlp_layernorm.weight"] = norm
        for kind in ("weight", "bias"):
            state[f"mlp.router.{kind}"] = full[f"{here}mlp.router.{kind}"]
        state.update(megatron_gpt_oss(full, config, at, here))
        return state
    if f"{here}mlp.gate.weight" not in full:
        state["mlp.linear_fc1.layer_norm_weight"] = norm
        state["mlp.linear_fc1.weight"] = np.concatenate(
            [column("mlp.gate_proj.weight"), column("mlp.up_proj.weight")]
        )
        state["mlp.linear_fc2.weight"] = row("mlp.down_proj.weight")
        return state
    state["pre_mlp_layernorm.weight"] = norm
    state["mlp.router.weight"] = full[f"{here}mlp.gate.weight"]
    if f"{here}mlp.gate.e_score_correction_bias" in full:
        state["mlp.router.expert_bias"] = full[f"{here}mlp.gate.e_score_correction_bias"]
        shared = [column(f"mlp.shared_experts.{part}_proj.weight") for part in ("gate", "up")]
        state["mlp.shared_experts.linear_fc1.weight"] = np.concatenate(shared)
        state["mlp.shared_experts.linear_fc2.weight"] = row("mlp.shared_experts.down_proj.weight")
    state.update(megatron_experts(full, config, at, here, style))
    return state


def interleave(full: Arrays, config: dict[str, Any], at: Rank, here: str, kind: str) -> np.ndarray[Any, Any]:
    """Group by group: its query heads, its key head, its value head."""
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q, k, v = (full[f"{here}self_attn.{part}_proj.{kind}"] for part in "qkv")
    rows = []
    for g in range(groups * at.tp_rank // at.tp, groups * (at.tp_rank + 1) // at.tp):
        for h in range(heads // groups * g, heads // groups * (g + 1)):
            rows.append(q[h * size : (h + 1) * size])
        rows += [k[g * size : (g + 1) * size], v[g * size : (g + 1) * size]]
    return np.concatenate(rows)


def megatron_experts(full: Arrays, config: dict[str, Any], at: Rank, here: str, style: str) -> Arrays:
    count = config.get("num_experts", config.get("n_routed_experts"))
    own = range(count * at.ep_rank // at.ep, count * (at.ep_rank + 1) // at.ep)
    first, second = [], []
    for expert in own:
        name = f"{here}mlp.experts.{expert}."
        gate_up = [cut(full[f"{name}{part}_proj.weight"], 0, at.etp_rank, at.etp) for part in ("gate", "up")]
        first.append(np.concatenate(gate_up))
        second.append(cut(full[f"{name}down_proj.weight"], 1, at.etp_rank, at.etp).copy())
    if style == "legacy":
        return {
            "mlp.experts.weight1": np.stack([a.T for a in first]).reshape(first[0].shape[1], -1),
            "mlp.experts.weight2": np.stack([a.T for a in second]).reshape(-1, second[0].shape[0]),
        }
    names = {
        "grouped": "mlp.experts.linear_fc{f}.weight{e}",
        "sequential": "mlp.experts.local_experts.{e}.linear_fc{f}.weight",
    }[style]
    pairs = [(f, e, a) for f, arrays in ((1, first), (2, second)) for e, a in enumerate(arrays)]
    return {names.format(f=f, e=e): a for f, e, a in pairs}


def megatron_gpt_oss(full: Arrays, config: dict[str, Any], at: Rank, here: str) -> Arrays:
    """[gate; up] of (out, in), out of columns that take turns of (in, out)."""
    count, state = config["num_local_experts"], {}
    for local, expert in enumerate(range(count * at.ep_rank // at.ep, count * (at.ep_rank + 1) // at.ep)):
        name = f"{here}mlp.experts.{expert}."
        weight = cut(full[f"{name}gate_up_proj"], 1, at.etp_rank, at.etp)
        bias = cut(full[f"{name}gate_up_proj_bias"], 0, at.etp_rank, at.etp)
        state[f"mlp.experts.linear_fc1.weight{local}"] = np.concatenate([weight[:, ::2].T, weight[:, 1::2].T])
        state[f"mlp.experts.linear_fc1.bias{local}"] = np.concatenate([bias[::2], bias[1::2]])
        down = cut(full[f"{name}down_proj"], 0, at.etp_rank, at.etp)
        state[f"mlp.experts.linear_fc2.weight{local}"] = down.T.copy()
        state[f"mlp.experts.linear_fc2.bias{local}"] = full[f"{name}down_proj_bias"]
    return state


# --- FSDP2 ---


def fsdp_state(full: Arrays, fsdp: int, rank: int, tp_dims: dict[str, int], tp: int, tp_rank: int) -> Arrays:
    """One rank's local shards: TP first, then rows in ceil chunks, as `fully_shard` does it."""
    state = {}
    for name, array in full.items():
        if name in tp_dims:
            array = cut(array, tp_dims[name], tp_rank, tp)
        chunk = -(-array.shape[0] // fsdp)
        state[name] = array[rank * chunk : (rank + 1) * chunk].copy()
    return state


def stacked(full: Arrays, experts: int) -> Arrays:
    """Stacked experts only, as transformers 5 keeps them: two tensors a layer (GPT-OSS: and two biases)."""
    made = {}
    for name in full:
        at, found, tail = name.partition(".experts.0.")
        every = [f"{at}.experts.{e}." for e in range(experts)]
        if tail == "gate_proj.weight":
            pairs = [[full[f"{e}{p}_proj.weight"] for p in ("gate", "up")] for e in every]
            made[f"{at}.experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in pairs])
        elif found and tail != "up_proj.weight":
            made[f"{at}.experts.{tail.removesuffix('.weight')}"] = np.stack([full[e + tail] for e in every])
    return made


# --- vLLM ---


def vllm_state(full: Arrays, config: dict[str, Any], at: Rank, slots: list[int] | None = None) -> Arrays:
    """One rank's arrays as vLLM keeps them; `slots`: the expert in each slot of all ranks."""
    layers, state = config["num_hidden_layers"], {}
    tied, last = "lm_head.weight" not in full, at.pp_rank == at.pp - 1
    padded = -(-config["vocab_size"] // 64) * 64
    vocabularies = {
        "model.embed_tokens.weight": at.pp_rank == 0 or (tied and last),
        "lm_head.weight": last and not tied,
    }
    extra = range(layers, layers + config.get("num_nextn_predict_layers", 0)) if last else range(0)
    for layer in extra:
        here = f"model.layers.{layer}."
        vocabularies |= {f"{here}embed_tokens.weight": True, f"{here}shared_head.head.weight": True}
        for key in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
            state[f"{here}{key}.weight"] = full[f"{here}{key}.weight"]
    for name, held in vocabularies.items():
        if held:
            state[name] = padded_share(full[name], padded, at.tp_rank, at.tp)
    if last:
        state["model.norm.weight"] = full["model.norm.weight"]
    for layer in [*stage_layers(layers, at.pp, at.pp_rank), *extra]:
        here = f"model.layers.{layer}."
        state |= {here + key: value for key, value in vllm_layer(full, config, at, here, slots).items()}
    return {name: array.copy() for name, array in state.items()}


def vllm_layer(full: Arrays, config: dict[str, Any], at: Rank, here: str, slots: list[int] | None) -> Arrays:
    state: Arrays = {}

    def get(name: str, dim: int | None = None) -> np.ndarray[Any, Any]:
        array = full[here + name]
        return array if dim is None else cut(array, dim, at.tp_rank, at.tp)

    def has(name: str) -> bool:
        return here + name in full

    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        state[name] = get(name)
    for name in (
        "q_norm.weight",
        "k_norm.weight",
        "q_a_layernorm.weight",
        "kv_a_layernorm.weight",
        "o_proj.bias",
    ):
        if has(f"self_attn.{name}"):
            state[f"self_attn.{name}"] = get(f"self_attn.{name}")
    state["self_attn.o_proj.weight"] = get("self_attn.o_proj.weight", 1)
    if has("self_attn.sinks"):
        state["self_attn.sinks"] = get("self_attn.sinks", 0)
    if has("self_attn.kv_b_proj.weight"):
        joined = [get("self_attn.q_a_proj.weight"), get("self_attn.kv_a_proj_with_mqa.weight")]
        state["self_attn.fused_qkv_a_proj.weight"] = np.concatenate(joined)
        for name in ("self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight"):
            state[name] = get(name, 0)
    for kind in ("weight", "bias"):
        if has(f"self_attn.k_proj.{kind}"):
            kv, size = config["num_key_value_heads"], config["head_dim"]
            parts = [get(f"self_attn.q_proj.{kind}", 0)]
            for part in "kv":  # whole heads, several ranks the same one where there are more ranks than heads
                own, shares = (at.tp_rank, at.tp) if kv >= at.tp else (at.tp_rank // (at.tp // kv), kv)
                parts.append(cut(full[f"{here}self_attn.{part}_proj.{kind}"], 0, own, shares))
                assert parts[-1].shape[0] % size == 0
            state[f"self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
    for mlp in ("mlp", "mlp.shared_experts"):
        if has(f"{mlp}.gate_proj.weight"):
            joined = [get(f"{mlp}.gate_proj.weight", 0), get(f"{mlp}.up_proj.weight", 0)]
            state[f"{mlp}.gate_up_proj.weight"] = np.concatenate(joined)
            state[f"{mlp}.down_proj.weight"] = get(f"{mlp}.down_proj.weight", 1)
    for name in (
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.router.weight",
        "mlp.router.bias",
    ):
        if has(name):
            state[name] = get(name)
    if has("mlp.router.weight"):
        state |= vllm_gpt_oss(full, config, at, here)
    elif has("mlp.gate.weight"):
        state |= vllm_experts(full, config, at, here, slots)
    return state


def vllm_experts(
    full: Arrays, config: dict[str, Any], at: Rank, here: str, slots: list[int] | None
) -> Arrays:
    slots = slots or list(range(config.get("num_experts", config.get("n_routed_experts"))))
    w13, w2 = [], []
    for expert in cut(np.array(slots), 0, at.ep_rank, at.ep):
        name = f"{here}mlp.experts.{expert}."
        w13.append(
            [cut(full[f"{name}{part}_proj.weight"], 0, at.etp_rank, at.etp) for part in ("gate", "up")]
        )
        w2.append(cut(full[f"{name}down_proj.weight"], 1, at.etp_rank, at.etp))
    return {
        "mlp.experts.w13_weight": np.stack([np.concatenate(pair) for pair in w13]),
        "mlp.experts.w2_weight": np.stack(w2),
    }


def vllm_gpt_oss(full: Arrays, config: dict[str, Any], at: Rank, here: str) -> Arrays:
    """Kept as (experts, out, in), published as (experts, in, out), stacked or taken one by one."""

    def get(name: str, dim: int | None) -> np.ndarray[Any, Any]:
        if f"{here}mlp.experts.{name}" in full:
            array = full[f"{here}mlp.experts.{name}"]
        else:
            array = np.stack(
                [full[f"{here}mlp.experts.{e}.{name}"] for e in range(config["num_local_experts"])]
            )
        array = cut(array, 0, at.ep_rank, at.ep)
        return array if dim is None else cut(array, dim, at.etp_rank, at.etp)

    return {
        "mlp.experts.w13_weight": get("gate_up_proj", 2).transpose(0, 2, 1).copy(),
        "mlp.experts.w13_bias": get("gate_up_proj_bias", 1),
        "mlp.experts.w2_weight": get("down_proj", 1).transpose(0, 2, 1).copy(),
        "mlp.experts.w2_bias": get("down_proj_bias", None),
    }
