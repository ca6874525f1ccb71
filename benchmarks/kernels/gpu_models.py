"""Models whose shapes the GPU's kernels are measured in."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a model, and the number of layers that the benchmark keeps."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    layers: int
    kept: int
    head_dim: int = 128
    head_norms: bool = False
    """True if queries and keys have norms."""

    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """Return the outputs and inputs of each matrix, and whether it is gated."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden, False),
            "o": (self.hidden, self.heads * self.head_dim, False),
            "gate_up": (self.inner, self.hidden, True),
            "down": (self.hidden, self.inner, False),
        }


MODELS = (
    Model("Qwen3-0.6B", 1024, 16, 8, 3072, 151936, 28, 28, head_norms=True),
    Model("Llama-3.1-8B", 4096, 32, 8, 14336, 128256, 32, 8),
)
