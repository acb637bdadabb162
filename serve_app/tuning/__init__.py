"""Finds the settings that meet a goal: a model of a service in virtual time, and profiles of devices."""
