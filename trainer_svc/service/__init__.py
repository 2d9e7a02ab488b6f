"""What the trainer service is made of: intake of batches, the loop, what it reports."""
