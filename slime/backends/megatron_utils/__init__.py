"""Upstream's import path for functions of users; the trainer is `slime.backends.megatron`."""
