# The doors of this repository; everything is done by ./bedplate.
.PHONY: demo up test constraints docs migration

demo up test:
	./bedplate $@

# Pins for every extra; without addresses, so that any index serves them.
constraints:
	printf 'uv\nsetuptools>=75,<85\n' | uv pip compile -q --universal --no-header --no-annotate --no-emit-index-url \
	  --no-emit-find-links --python-version 3.11 --all-extras --upgrade pyproject.toml - -o constraints.txt

# What is generated from the code; tests compare.
docs:
	.venv/bin/python -m controlplane.embedded.reference

migration:
	.venv/bin/python -m controlplane.migrate revision
