"""Rows of the dashboard, one per module."""
