"""The agent as a service: sessions, streams, the keeper, metrics. It works on while the control plane is away."""
