"""The engine of rows: sends the rows of batches and datasets to the engines until each has its result."""
