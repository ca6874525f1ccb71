"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from sidestep.executor.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The shared decoder; ModelSpec says what is particular to this family."""
