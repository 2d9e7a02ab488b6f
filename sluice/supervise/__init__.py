"""The processes of a run on one machine.

`plan` turns settings into children, `supervisor` starts, restarts and ends them, `restart_policy` decides on restarts, `guard` ends
children whose supervisor was killed, and `ranks` starts the processes of one trainer.
"""
