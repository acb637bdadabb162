"""Live traffic beside batch work on one engine, with and without a latency goal."""
