"""The engine core behind a socket: its own process or thread, the messages, and the caller's end."""
