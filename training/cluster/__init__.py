"""The same environments, methods and losses on verl: Ray, FSDP and vLLM."""
