"""The replicas of a run, and sampling from the policy through them, whatever happens to one of them."""
