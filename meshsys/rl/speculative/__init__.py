"""Rollouts of the epoch before as drafts of the next ones: verified in parallel, and continued where they end.

`drafts` keeps them, `accept` says how much of them stays, `sampling` has them verified and continued.
"""
