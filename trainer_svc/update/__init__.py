"""One update of the policy on a batch of samples."""
