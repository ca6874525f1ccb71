"""Granite for Sidestep: Llama whose activations are scaled in four places."""
