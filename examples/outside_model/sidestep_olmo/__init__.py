"""OLMo for Sidestep: Llama with LayerNorms that have no weights."""
