"""Serves an environment over gRPC: the environment itself runs in processes that can be killed."""
