"""A real small model behind the gateway: llama.cpp with SmolLM2, asked through OpenAI's SDK and beside it directly."""

from __future__ import annotations
