"""Inside vLLM: loading staged files, what ranks read, comparing live weights."""
