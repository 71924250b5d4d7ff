"""Publishes which blocks of the prefix cache are stored and removed, for routers that choose among engines."""
