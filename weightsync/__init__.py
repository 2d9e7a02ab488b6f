"""The weight path. Trainers use `publisher`, engines `receiver`; `app` is the service between them.

Behind these: `format` (what travels), `codec` (deltas), `publish`, `store`, `relaying`, `receive`, `engine` (inside vLLM), and
`inspect` (what operators see).
"""
