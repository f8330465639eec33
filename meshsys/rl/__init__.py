"""Reinforcement learning: policies learn from what they sample."""
