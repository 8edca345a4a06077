"""The agent on every host: standard library first, third-party modules only inside the verb that needs them."""
