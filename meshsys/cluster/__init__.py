"""Jobs on the sub-slices of one pod. Placement knows no JAX."""
