"""Inside vLLM's workers: loading staged files into the live model, and comparing the two."""
