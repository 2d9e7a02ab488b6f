"""The checks of `sluice doctor`: this machine, a run's settings on it, and the services that a run talks to."""
