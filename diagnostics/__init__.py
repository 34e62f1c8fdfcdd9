"""The instrument: what a privileged context changes in a policy's outputs and hidden states."""
