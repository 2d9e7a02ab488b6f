"""The OpenAI dialect over HTTP: its requests, responses, errors and server. Imports neither torch nor vLLM nor a tokenizer."""
