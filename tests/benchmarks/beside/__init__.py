"""Live traffic beside batch rows on one engine, through the whole service."""
