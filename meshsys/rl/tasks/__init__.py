"""Prompts to learn from, by number.

Imports nothing, as the options of tasks are part of every configuration.
"""
