"""`sluice trace`: show how a group or a trajectory came to be, or send the spans of a run to a collector."""
