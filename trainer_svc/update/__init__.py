"""Update the policy, and its critic, on a batch of samples."""
