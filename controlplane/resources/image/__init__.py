"""Guest images of the deployment: described by a manifest, made of files by content, copied to hosts when a VM needs them."""
