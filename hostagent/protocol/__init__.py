"""What control plane and agent say to each other: the only part of the agent that the control plane may import."""
