"""Doubles that tests of several rooms share: a clock, a disk, a service on loopback."""
