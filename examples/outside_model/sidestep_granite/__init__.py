"""Granite for Sidestep: Llama with four scaling factors on its activations."""
