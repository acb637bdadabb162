"""Live traffic beside batch work on one engine, with and without latency goals."""
