"""The parts of the script that trains the bundled tiny-python model."""
