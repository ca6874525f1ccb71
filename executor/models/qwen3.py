"""Qwen3, dense: Llama with normalised queries and keys, and heads of their own size."""

from __future__ import annotations

from sidestep.executor.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The shared decoder; ModelSpec has what is particular."""
