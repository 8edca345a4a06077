"""Health checks of load-balancer backends, made by the agent of the host that balances."""
