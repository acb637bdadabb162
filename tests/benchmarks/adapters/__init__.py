"""LoRA adapters: the service beside `vllm serve`, and a flood on one adapter beside the others."""
