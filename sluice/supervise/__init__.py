"""The processes of a run on one machine: what to start, how to keep it alive, and how to end all of it.

`plan` turns settings into children, `supervisor` keeps them, `child_process` is one life of a child, `guard` ends children whose
supervisor was killed. Nothing here prints; the view is a `Listener`.
"""
