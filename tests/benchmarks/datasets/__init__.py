"""`saturate batch` beside other ways to send a dataset through a model."""
