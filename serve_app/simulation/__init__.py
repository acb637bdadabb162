"""A simulated device for vLLM: its steps take the time of a profile and no CPU.

Scheduler, KV blocks, prefix cache, preemption, chunked prefill and servers are vLLM's own.
"""
