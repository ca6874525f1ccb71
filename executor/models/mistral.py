"""Mistral: Llama with a sliding window in some versions."""

from __future__ import annotations

from sidestep.executor.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """The shared decoder; ModelSpec says what is particular to this family."""
