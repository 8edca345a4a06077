"""Reserved public addresses: kept by a project whatever happens to the machines under them."""
