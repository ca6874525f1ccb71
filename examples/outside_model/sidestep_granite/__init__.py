"""Granite for Sidestep: Llama with activations that are scaled in four places."""
