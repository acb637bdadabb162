"""Turns of models on one device: one model of a group is awake while the other models sleep."""
