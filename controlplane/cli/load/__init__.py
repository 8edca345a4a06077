"""Load on any OpenAI-compatible URL: what is asked, how it is sent, what it took, what it means."""
