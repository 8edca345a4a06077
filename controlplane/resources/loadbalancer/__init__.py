"""Load balancers of layer 4: addresses and ports in front of machines, carried by edge hosts."""
