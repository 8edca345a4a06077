"""One aggregate a file; SQLAlchemy only. Import `controlplane.models.all` where every table must be known."""
