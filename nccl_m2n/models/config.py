# SPDX-License-Identifier: Apache-2.0
"""A model's configuration read key by key: nested parts, other spellings, and errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping

from nccl_m2n.dtypes import dtype_name
from nccl_m2n.errors import CommandError, LayoutError
from nccl_m2n.models.reading import whole

_TEXT = ("text_config", "llm_config", "language_config")  # the language part of a configuration of several
_KINDS = {  # a kind of layer -> the keys of what it has otherwise than the others
    "full_attention": {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"},
    "sliding_attention": {
        key: f"swa_{key}" for key in ("head_dim", "v_head_dim", "num_key_value_heads", "num_attention_heads")
    },
}
_SPELLINGS = {  # a key -> how else configurations spell it
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim", "hidden_dim"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "max_position_embeddings": ("n_positions",),
    "linear_num_heads": ("linear_attn_config.num_heads",),
    "linear_head_dim": ("linear_attn_config.head_dim",),
    "linear_conv_kernel_dim": ("linear_attn_config.short_conv_kernel_size",),
}


class Config:
    """What a configuration says, its language part first, then what stands around it.

    Args:
        values: The configuration.
        label: What it is called in messages.
        options: The caller's options beside it.
    """

    def __init__(
        self, values: Mapping[str, object], label: str = "config", options: Mapping[str, object] | None = None
    ) -> None:
        self._outer = values
        parts = (values.get(key) for key in _TEXT)
        self._inner: Mapping[str, object] = next((p for p in parts if isinstance(p, Mapping) and p), {})
        self.label = label
        self._options = dict(options or {})
        self._layers: dict[str, Config] = {}

    @property
    def family(self) -> str | None:
        """The ``model_type``; None where there is none.

        Raises:
            CommandError: If it is no text.
        """
        family = self._outer.get("model_type")
        if family is not None and not isinstance(family, str):
            raise CommandError(f"{self.label} has {family!r:.80} for 'model_type', not a name")
        return family

    @property
    def dtype(self) -> str:
        """The element type of the weights: as asked, as stated, or bfloat16."""
        stated = self.get("torch_dtype") or self.get("dtype") or "bfloat16"
        wanted = self._options.get("dtype", stated)
        if isinstance(wanted, list | dict | int | float):
            raise CommandError(f"{self.label} has {wanted!r:.80} for 'dtype', not an element type")
        try:
            return dtype_name(wanted)
        except LayoutError as error:
            raise CommandError(f"{self.label}: {error}") from None

    def get(self, key: str, default: object = None) -> object:
        """What a key says, whatever it is; `default` where it is absent or null."""
        for name in (key, *_SPELLINGS.get(key, ())):
            part, _, inner = name.rpartition(".")
            for values in (self._inner, self._outer):
                held = values.get(part) if part else values
                if isinstance(held, Mapping) and held.get(inner) is not None:
                    return held[inner]
        return default

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: str) -> int:
        """A number that must be there, 1 or more.

        Raises:
            CommandError: If it is absent or no such number.
        """
        value = self.number(key)
        if value < 1:
            raise CommandError(f"{self.label} has {value!r} for {key!r}, expected 1 or more")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """A number of 0 or more; `default` where it is absent.

        Raises:
            CommandError: If it is absent and has no default, or is no such number.
        """
        value = self.get(key, default)
        if value is None:
            raise CommandError(f"{self.label} lacks the key {key!r}")
        if not whole(value):
            raise CommandError(f"{self.label} has {value!r:.80} for {key!r}, not a number")
        assert isinstance(value, int)  # for type checkers
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A switch."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def tied(self, default: bool = False) -> bool:
        """Whether the embedding is the output head; what stands around a language part decides."""
        outer = self._outer.get("tie_word_embeddings")
        return outer if isinstance(outer, bool) else self.flag("tie_word_embeddings", default)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of words; empty where it is absent."""
        value = self.get(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self.error(key, value, "a list of words")
        return tuple(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of numbers; empty where it is absent."""
        value = self.get(key, ())
        if not isinstance(value, list | tuple) or not all(map(whole, value)):
            raise self.error(key, value, "a list of numbers")
        return tuple(value)

    def of_layer(self, layer: int | None) -> Config:
        """What it says of one layer: the same, but for what it says of this layer or of layers of its kind."""
        kinds = self.get("layer_types", ())
        own = self.get("per_layer_config", {})
        said = own.get(str(layer), {}) if isinstance(own, Mapping) else {}
        if layer is not None and isinstance(kinds, list | tuple) and layer < len(kinds):
            others = _KINDS.get(str(kinds[layer]), {})
            found = {key: value for key, name in others.items() if (value := self.get(name)) is not None}
            said = {**found, **said} if isinstance(said, Mapping) else found
        if not said:
            return self
        key = repr(sorted(said.items(), key=str))
        if key not in self._layers:
            flat = {k: v for k, v in {**self._outer, **self._inner, **said}.items() if k not in _TEXT}
            self._layers[key] = Config(flat, self.label, self._options)
        return self._layers[key]

    def error(self, key: str, value: object, expected: str) -> CommandError:
        """What to raise for a value that cannot be."""
        return CommandError(f"{self.label} has {value!r:.80} for {key!r}, expected {expected}")

    def part(self, key: str) -> Config:
        """A nested configuration, such as ``"vision_config"``.

        Raises:
            CommandError: If there is none.
        """
        value = self._outer.get(key)
        if not isinstance(value, Mapping):
            raise CommandError(f"{self.label} lacks the part {key!r}")
        return Config(value, f"{self.label}, {key}", {"dtype": self.dtype})

    @property
    def quantization(self) -> Mapping[str, object]:
        """The ``quantization_config``; empty where there is none."""
        found = self.get("quantization_config", {})
        return found if isinstance(found, Mapping) else {}

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, where it is said."""
        said = self.quantization.get("weight_block_size")
        if said is None:
            return None
        if not isinstance(said, list | tuple) or len(said) != 2 or not all(whole(n) and n for n in said):
            raise self.error("weight_block_size", said, "rows and columns")
        return said[0], said[1]

    def option(self, key: str, default: bool) -> bool:
        """One of the caller's switches, taken off the list of those not yet understood."""
        return bool(self._options.pop(key, default))

    def refuse_leftovers(self) -> None:
        """Raise if the caller gave an option that the family does not know."""
        left = [key for key in self._options if key != "dtype"]
        if left:
            raise CommandError(f"{', '.join(left)}: no such option for a manifest of family {self.family}")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self["num_attention_heads"]

    @property
    def kv_heads(self) -> int:
        """Key-value heads: as many as query heads where nothing is said."""
        said = "num_key_value_heads" in self
        return self["num_key_value_heads" if said else "num_attention_heads"]

    @property
    def head_dim(self) -> int:
        """Rows of one head."""
        return self["head_dim"] if "head_dim" in self else self["hidden_size"] // self.heads

    def size(self, text: int | str) -> int:
        """A number of elements: a number, a key, or a product of them such as ``"num_key_value_heads * head_dim"``.

        Raises:
            CommandError: If a key is missing.
        """
        if isinstance(text, int):
            return text
        total = 1
        for factor in (part.strip() for part in text.split("*")):
            total *= int(factor) if factor.isdecimal() else self._named(factor)
        return total

    def _named(self, key: str) -> int:
        derived = {"num_key_value_heads": "kv_heads", "head_dim": "head_dim"}.get(key)
        try:
            return int(getattr(self, derived)) if derived else self[key]
        except CommandError as error:
            raise CommandError(
                f"{error}, which says how the tensor may be cut; put the model's config.json beside its weights, "
                "or give the manifest a config with it"
            ) from None
