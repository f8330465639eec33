"""Jobs and their slices in the terms of real clusters: one module a target, and a registry of them."""
