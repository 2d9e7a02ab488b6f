"""The service that plays the episodes of a run with a Python class of the user's."""
