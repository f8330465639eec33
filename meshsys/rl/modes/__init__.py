"""In what order a run samples and learns: one after the other, or at once on devices of their own."""
