"""Private networks: a prefix of the operator's pool and a ULA /64 each, unique in the whole deployment."""
