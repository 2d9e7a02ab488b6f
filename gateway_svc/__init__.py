"""The gateway: existing agents call it in the OpenAI and Anthropic dialects, and it records a generation for each request."""
