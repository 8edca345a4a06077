"""Disks: made, attached, grown, limited, deleted; the root disk of a machine is one of them."""
