"""OpenAI's files and batches on the service's own engines."""
