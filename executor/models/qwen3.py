"""Qwen3, dense: Llama with normed queries and keys, and a head size of its own."""

from __future__ import annotations

from sidestep.executor.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The shared decoder; ModelSpec says what is particular to this family."""
