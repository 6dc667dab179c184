"""What a step has to do at the least, and how far from that it is: bytes over bandwidth, operations over speed.

A step cannot be faster than reading once what it needs, nor than multiplying what it multiplies; the slower of the
two binds. Arithmetic alone: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a model costs time.

    Attributes:
        layer_weight_bytes: of all weights but the embedding and the output layer, as they lie in memory.
        layer_weights: numbers in the linear layers among them.
        head_weight_bytes, head_weights: of the output layer, tied to the embedding or not.
        token_bytes: of KV.
        num_layers, num_heads, head_dim: of the attention.
    """

    layer_weight_bytes: int
    layer_weights: int
    head_weight_bytes: int
    head_weights: int
    token_bytes: int
    num_layers: int
    num_heads: int
    head_dim: int

    @property
    def attention_flops(self) -> int:
        """Of one query and one key, in all layers: a product for the score, one for the value."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least that has to be done."""

    read_bytes: int
    flops: int

    @classmethod
    def of_decode(cls, shape: Shape, batch: int, context: int) -> Work:
        """One token for each of `batch` rows, each with `context` keys, the newest among them."""
        return cls(
            read_bytes=shape.layer_weight_bytes + shape.head_weight_bytes + batch * context * shape.token_bytes,
            flops=batch * (2 * (shape.layer_weights + shape.head_weights) + context * shape.attention_flops),
        )

    @classmethod
    def of_prefill(cls, shape: Shape, tokens: int, chunk_tokens: int) -> Work:
        """The KV of `tokens` tokens in chunks: each reads the weights and what is before it; no logits."""
        chunks = -(-tokens // chunk_tokens)
        before = sum(range(0, tokens, chunk_tokens))
        pairs = tokens * (tokens + 1) // 2
        return cls(
            read_bytes=chunks * shape.layer_weight_bytes + before * shape.token_bytes,
            flops=2 * tokens * shape.layer_weights + pairs * shape.attention_flops,
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the machine can do with so many threads."""

    threads: int
    read_bytes_per_s: float
    flops_per_s: float

    def binding(self, work: Work) -> tuple[str, float]:
        """("memory" or "compute", the ms that it takes at the least)."""
        memory_ms = work.read_bytes / self.read_bytes_per_s * 1e3
        compute_ms = work.flops / self.flops_per_s * 1e3
        return ("memory", memory_ms) if memory_ms >= compute_ms else ("compute", compute_ms)
