"""One update of the policy from samples: what the objective needs is computed first, then the steps are made."""
