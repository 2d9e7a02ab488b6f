"""The dialects: each file parses the requests of one API and writes its responses."""
