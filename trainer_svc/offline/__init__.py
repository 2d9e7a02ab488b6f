"""Training on files of data instead of samples of the policy: demonstrations and preferences."""
