"""Say what is wrong with a run: rules over its metrics and its state, as pure functions.

`rules` holds every rule and its text. `watch` applies them to the steps and states of a run as they come.
`files` reads both from a run's directory, also while the run lives.
"""
