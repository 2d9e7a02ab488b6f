"""An object store that mirrors the versions of a weight service: one service writes it, services at other sites read it."""
