"""Parts of the script that trains the bundled tiny-python model."""
