"""A run on a Ray cluster: one actor for each process of the plan, and a driver that places, starts, moves and ends them.

Ray places actors and starts them again; it carries a few control words. Tokens, weights and calls between services stay on gRPC.
"""
