"""Reinforcement learning: tasks give prompts, a policy answers, rewards judge, and the policy learns.

Imports nothing: the processes that compute rewards pass here, and have no use for JAX.
"""
