"""What people see of a run: the live view, the stages of a longer job, and the summary of a finished run."""
