"""The gateway: agents that exist talk to it in the OpenAI and Anthropic dialects, and each request becomes a recorded generation."""
