"""Turns of models on one device: one of a group is awake, the others sleep."""
