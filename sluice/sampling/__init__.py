"""The replicas of a run, and sampling from the policy through them. Failures of single replicas are handled here."""
