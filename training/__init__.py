"""Training agents with privileged self-distillation, on real environments."""
