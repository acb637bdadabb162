"""Datasets: `saturate batch` sends every row of a dataset through a service."""
