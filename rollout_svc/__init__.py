"""Inference: samples from the policy over gRPC and the OpenAI dialect."""
