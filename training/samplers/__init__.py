"""Samplers: from token ids to sampled token ids and their log-probs."""
