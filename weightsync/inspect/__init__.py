"""`sluice weights`: looking into the versions of a run."""
