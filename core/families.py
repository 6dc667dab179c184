"""The decoder families pdctl serves: what config.json means in each, and what of it is refused.

A key means what transformers' own classes make of it: absent, it stands for the class's default; not read by
the class, it stands for nothing, and is refused if its author meant something by it. Knows no files and no
weights; called by checkpoint.py with what it read. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture as transformers implements it.

    Attributes:
        model_type: what goes with the architecture; the loader picks its class by this.
        num_kv_heads: of an absent key; None: as many as heads.
        head_dim: of an absent key; None: hidden_size // num_attention_heads.
        tied: whether the output layer is the embedding, of an absent key.
        window_of: "no" layer; "all" layers, if sliding_window is set; "typed": the layers that layer_types names.
        sliding_window: of an absent key.
        has_window_switch: sliding_window counts only if use_sliding_window is true, which it is not by default.
        softcaps: the keys of soft-caps that are read.
        activation, activation_key: the one that is verified, and under which key it stands.
        is_scaled: whether queries are scaled by query_pre_attn_scalar.
        rope_types: that its class accepts and that are verified.
        has_two_ropes: one for layers with, one for layers without a window.
        has_partial_rope: whether partial_rotary_factor is read.
        original_context: of an absent original_max_position_embeddings; None: see `_original_context`.
        has_fused_qkv: one projection makes queries, keys and values.
        adopted_code: the class in the code that its first checkpoints carry, which is transformers' own by now.
    """

    model_type: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    window_of: str = "no"
    sliding_window: int | None = None
    has_window_switch: bool = False
    softcaps: frozenset[str] = frozenset()
    activation: str = "silu"
    activation_key: str = "hidden_act"
    is_scaled: bool = False
    rope_types: frozenset[str] = frozenset({"default", "linear", "llama3", "yarn", "dynamic", "longrope"})
    has_two_ropes: bool = False
    has_partial_rope: bool = False
    original_context: int | None = None
    has_fused_qkv: bool = False
    adopted_code: str | None = None


_ATTENTION_CAP: Final = "attn_logit_softcapping"
_FINAL_CAP: Final = "final_logit_softcapping"
_WINDOW_TYPES: Final = frozenset({"full_attention", "sliding_attention"})

FAMILIES: Final = {
    "LlamaForCausalLM": Family(model_type="llama"),
    "MistralForCausalLM": Family(model_type="mistral", num_kv_heads=8, window_of="all", sliding_window=4096),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2", num_kv_heads=32, window_of="typed", sliding_window=4096, has_window_switch=True
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        num_kv_heads=32,
        head_dim=128,
        window_of="typed",
        sliding_window=4096,
        has_window_switch=True,
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        num_kv_heads=4,
        head_dim=256,
        tied=True,
        window_of="typed",
        sliding_window=4096,
        softcaps=frozenset({_ATTENTION_CAP, _FINAL_CAP}),
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        is_scaled=True,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        num_kv_heads=4,
        head_dim=256,
        tied=True,
        window_of="typed",
        sliding_window=4096,
        # Its attention does not read attn_logit_softcapping.
        softcaps=frozenset({_FINAL_CAP}),
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        is_scaled=True,
        has_two_ropes=True,
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        window_of="all",
        rope_types=frozenset({"default", "longrope"}),
        has_partial_rope=True,
        original_context=4096,
        has_fused_qkv=True,
        adopted_code="modeling_phi3.Phi3ForCausalLM",
    ),
}

# Angles of these change with a sequence's own length, which the tokens of a packed forward do not share. Up to a
# certain length they do not.
_LENGTH_DEPENDENT: Final = frozenset({"dynamic", "longrope"})

# What would change attention or layers if the family's class read it.
_UNREAD: Final = {
    "is_encoder_decoder": "pdctl serves decoders only",
    "add_cross_attention": "pdctl serves decoders only",
    "use_bidirectional_attention": "a token would see those after it, which are not there yet",
    "num_local_experts": "mixtures of experts are not verified",
    "num_experts": "mixtures of experts are not verified",
    "n_routed_experts": "mixtures of experts are not verified",
    "num_kv_shared_layers": "layers that share their KV are not verified",
    "per_layer_config": "layers that differ in heads or sizes are not verified",
    "attention_chunk_size": "attention in chunks is not verified",
    "no_rope_layers": "layers without positions are not verified",
}

Refuse = Callable[[str, str], Exception]


@dataclass(frozen=True, kw_only=True)
class ContextLimit:
    """How long a context can be.

    Attributes:
        tokens: the most.
        rope_type: of the rope that sets the limit, because its angles change beyond; None: the model's own limit.
    """

    tokens: int
    rope_type: str | None


def check_attention(
    family: Family,
    raw: Mapping[str, Any],
    refuse: Refuse,
    *,
    num_layers: int,
    head_dim: int,
    max_position_embeddings: int,
) -> ContextLimit:
    """Refuses what pdctl's attention cannot do, and what transformers would silently leave out.

    Args:
        raw: config.json.
        refuse: makes the error to raise of (what is there, why not).

    Returns:
        The context up to which K depends on nothing but tokens and position.
    """
    for key, why in _UNREAD.items():
        if raw.get(key):
            raise refuse(f"{key} {shown(raw[key])}", why)
    if raw.get("is_causal") is False:
        raise refuse("is_causal false", _UNREAD["use_bidirectional_attention"])
    if raw.get("v_head_dim") not in (None, head_dim):
        raise refuse(
            f"v_head_dim {shown(raw['v_head_dim'])}", f"keys and values have one size here, head_dim {head_dim}"
        )
    activation = raw.get(family.activation_key, family.activation)
    if activation != family.activation:
        raise refuse(f"{family.activation_key} {shown(activation)}", f"only {family.activation} is verified")
    _check_windows(family, raw, refuse, num_layers, max_position_embeddings)
    _check_softcaps(family, raw, refuse)
    return _check_ropes(family, raw, refuse, max_position_embeddings)


def _check_windows(
    family: Family, raw: Mapping[str, Any], refuse: Refuse, num_layers: int, max_position_embeddings: int
) -> None:
    window = raw.get("sliding_window", family.sliding_window)
    switch = raw.get("use_sliding_window")
    if window is not None and not _is_positive_int(window):
        raise refuse(f"sliding_window {shown(window)}", "expected a positive integer or null")
    is_felt = window is not None and window < max_position_embeddings
    if family.has_window_switch:
        window = window if switch else None
    elif switch and window is None:
        raise refuse("use_sliding_window true", "there is no sliding_window")
    elif is_felt and family.window_of == "no" and switch is not False:
        raise refuse(f"sliding_window {window}", "this architecture has none")
    elif is_felt and family.window_of != "no" and switch is False:
        raise refuse(f"sliding_window {window} and use_sliding_window false", "this architecture reads no switch")

    types = raw.get("layer_types")
    if types is None:
        # Of the families with typed layers, those without a switch have windows in some layers by default.
        if family.window_of == "typed" and not family.has_window_switch and window is None:
            raise refuse("sliding_window null", "some of its layers are sliding by default")
        return
    if not isinstance(types, list) or len(types) != num_layers:
        raise refuse(f"layer_types {shown(types)}", f"expected a list with one type for each of {num_layers} layers")
    for kind in types:
        if not isinstance(kind, str) or kind not in _WINDOW_TYPES:
            raise refuse(f"layer_types {shown(kind)}", f"only {' and '.join(sorted(_WINDOW_TYPES))} are verified")
        if kind == "sliding_attention" and (window is None or family.window_of == "no"):
            raise refuse(f"layer_types {shown(kind)}", "no sliding window is in force")
        if kind == "full_attention" and family.window_of == "all" and window is not None:
            raise refuse(
                f"layer_types {shown(kind)} and sliding_window {window}",
                "this architecture slides in all layers or none",
            )


def _check_softcaps(family: Family, raw: Mapping[str, Any], refuse: Refuse) -> None:
    for key in (_ATTENTION_CAP, _FINAL_CAP, "logit_softcapping", "attn_logit_softcap"):
        value = raw.get(key)
        if value is None:
            continue
        if key not in family.softcaps:
            raise refuse(f"{key} {shown(value)}", "this architecture does not soft-cap these logits")
        if not _is_positive_number(value):
            raise refuse(f"{key} {shown(value)}", "expected a positive number or null")
    scalar = raw.get("query_pre_attn_scalar")
    if scalar is not None and not family.is_scaled:
        raise refuse(f"query_pre_attn_scalar {shown(scalar)}", "this architecture scales by head_dim alone")
    if scalar is not None and not _is_positive_number(scalar):
        raise refuse(f"query_pre_attn_scalar {shown(scalar)}", "expected a positive number")


def _check_ropes(
    family: Family, raw: Mapping[str, Any], refuse: Refuse, max_position_embeddings: int
) -> ContextLimit:
    limit = ContextLimit(tokens=max_position_embeddings, rope_type=None)
    if not family.has_partial_rope and raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise refuse(
            f"partial_rotary_factor {shown(raw['partial_rotary_factor'])}", "this architecture turns whole heads only"
        )
    for key, rope in _ropes(family, raw, refuse):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if not isinstance(kind, str) or kind not in family.rope_types:
            raise refuse(
                f"{key} of type {shown(kind)}", f"not verified; supported: {', '.join(sorted(family.rope_types))}"
            )
        if not family.has_partial_rope and rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise refuse(f"{key} with partial_rotary_factor", "this architecture turns whole heads only")
        if kind not in _LENGTH_DEPENDENT:
            continue
        tokens = max_position_embeddings
        if kind == "longrope":
            tokens = _original_context(family, raw, rope, max_position_embeddings)
        if not _is_positive_int(tokens):
            raise refuse(f"original_max_position_embeddings {shown(tokens)}", "expected a positive integer")
        if limit.rope_type is None or tokens < limit.tokens:
            limit = ContextLimit(tokens=min(tokens, max_position_embeddings), rope_type=kind)
    return limit


def _ropes(family: Family, raw: Mapping[str, Any], refuse: Refuse) -> list[tuple[str, Mapping[str, Any]]]:
    """Every rope that config.json describes, under the key it is found."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise refuse(f"{key} {shown(rope)}", "expected an object")
        is_nested = any(isinstance(value, dict) for value in rope.values())
        if is_nested and (key == "rope_scaling" or not family.has_two_ropes):
            raise refuse(f"{key} with an object for each layer type", "this architecture has one rope for all layers")
        if not (family.has_two_ropes and key == "rope_parameters"):
            found.append((key, rope))
            continue
        for layer_type, of_type in rope.items():
            if layer_type not in _WINDOW_TYPES or not isinstance(of_type, dict | None):
                raise refuse(f"{key} with {shown(layer_type)}", "expected one object for each layer type")
            found.append((f"{key}.{layer_type}", of_type or {}))
    return found


def _original_context(
    family: Family, raw: Mapping[str, Any], rope: Mapping[str, Any], max_position_embeddings: int
) -> Any:
    """The length after which longrope takes its other factors, from where transformers takes it."""
    key = "original_max_position_embeddings"
    if not family.has_two_ropes and (key in raw or family.original_context is not None):
        return raw.get(key, family.original_context)
    return rope.get(key, max_position_embeddings)


def shown(value: object) -> str:
    """A value of a file that anybody may have written, for one line of an error."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
